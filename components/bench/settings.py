"""Settings of a bench: one place for every default, built by the command line and the flows and
handed in."""

from __future__ import annotations

from pydantic import Field

from draftwell.serving.settings import Settings


class QualityFloor(Settings):
    """What a lossy strategy must keep. There is no default: flows take all of it from
    registry/gates.yaml."""

    called = "bench setting"

    min_argmax_share: float = Field(
        ge=0, le=1, description="share of emitted tokens that are the target's argmax"
    )
    max_rouge_l_loss: float = Field(
        ge=0, description="ROUGE-L points that may be lost to plain decoding"
    )

    @property
    def max_share_loss(self) -> float:
        """Share of the target's own tokens that may be lost."""
        return round(1 - self.min_argmax_share, 9)

    max_surprisal_shift: float = Field(
        ge=0,
        description="of sampled texts: nats a token by which the target may find them more or less "
        "likely than samples of its own",
    )

    def held(self, argmax_share: float, rouge_l_gained: float) -> bool:
        """Whether a strategy keeps both."""
        return argmax_share >= self.min_argmax_share and rouge_l_gained >= -self.max_rouge_l_loss


class BenchSettings(Settings):
    """What a bench decodes, how often, and what else it measures."""

    called = "bench setting"

    max_tokens: int = Field(64, ge=1, description="tokens to emit per prompt at most")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    runs: int = Field(
        1,
        ge=1,
        description="interleaved passes over the prompts; the median run of each prompt counts",
    )
    seed: int = Field(
        0, ge=0, description="seed of the first prompt; every further prompt has the next one"
    )
    warmup: bool = Field(
        True, description="let every contender decode a few tokens first, unmeasured"
    )
    limit: int | None = Field(
        None, ge=1, description="how many prompts, of those that are left; None takes all"
    )
    mix: bool = Field(False, description="take prompts of every task in turn")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="leave out prompts of more tokens, chat template included"
    )
    threads: int | None = Field(
        None, ge=1, description="threads of torch during the run; None leaves them as they are"
    )
    peers: tuple[str, ...] = Field(
        (), description="names of `environments.PEERS`, measured in the same run"
    )
    cost_ratios: bool = Field(
        True, description="also measure vanilla SD at its fastest gamma, which cost ratios refer to"
    )
    memory: bool = Field(
        False,
        description="first decode the longest prompt with each strategy, to see its peak memory",
    )
    leave_out: bool = Field(
        False,
        description="name a contender that fails in the report and measure the others; False, and "
        "a failure of plain decoding, end the run",
    )
    quality_floor: QualityFloor | None = Field(
        None, description="what a lossy strategy must keep; None judges none"
    )
    concurrency: int = Field(8, ge=2, description="requests at once, of a bench of throughput")


DEFAULTS = BenchSettings()
