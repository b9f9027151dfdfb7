"""Settings of a bench: one place for every default, built by the command line and the flows and
handed in."""

from __future__ import annotations

from pydantic import BaseModel, Field

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


class RunSettings(BaseModel):
    """What is decoded, as a report says it too."""

    max_tokens: int = Field(64, ge=1, description="tokens to emit per prompt at most")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    runs: int = Field(
        1,
        ge=1,
        description="interleaved passes over the prompts; the median run of each prompt counts",
    )
    warmup: bool = Field(
        True, description="let every contender decode a few tokens first, unmeasured"
    )
    seed: int = Field(
        0, ge=0, description="seed of the first prompt; every further prompt has the next one"
    )
    mix: bool = Field(False, description="take prompts of every task in turn")
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="leave out prompts of more tokens, chat template included; what takes more "
        "than 4096 with its answer is read only where this says so",
    )


class BenchSettings(Settings, RunSettings):
    """What a bench decodes, how often, and beside which peers."""

    called = "bench setting"

    threads: int | None = Field(
        None, ge=1, description="threads of torch during the run; None leaves them as they are"
    )
    peers: tuple[str, ...] = Field(
        (), description="names of `environments.PEERS`, measured in the same run"
    )
    concurrency: int = Field(8, ge=2, description="requests at once, of a bench of throughput")


DEFAULTS = BenchSettings()
