"""Settings of a bench: one place for every default, built by the command line and the flows and handed in."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class QualityFloor(BaseModel):
    """What a lossy strategy must keep. Flows set the share from registry/gates.yaml (`min_quality_ratio`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    min_argmax_share: float = Field(0.9, ge=0, le=1, description="share of emitted tokens that are the target's argmax")
    max_rouge_l_loss: float = Field(2.0, ge=0, description="ROUGE-L points that may be lost to plain decoding")

    def held(self, argmax_share: float, rouge_l_gained: float) -> bool:
        """Whether a strategy keeps both."""
        return argmax_share >= self.min_argmax_share and rouge_l_gained >= -self.max_rouge_l_loss


QUALITY_FLOOR = QualityFloor()


class BenchSettings(BaseModel):
    """What a bench decodes, how often, and what else it measures."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_tokens: int = Field(64, ge=1, description="tokens to emit per prompt at most")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    runs: int = Field(1, ge=1, description="interleaved passes over the prompts; the median run of each prompt counts")
    seed: int = Field(0, ge=0, description="seed of the first prompt; every further prompt has the next one")
    warmup: bool = Field(True, description="let every contender decode a few tokens first, unmeasured")
    limit: int | None = Field(None, ge=1, description="how many prompts, of those that are left; None takes all")
    mix: bool = Field(False, description="take prompts of every task in turn")
    max_prompt_tokens: int | None = Field(None, ge=1, description="leave out prompts of more tokens, chat template included")
    threads: int | None = Field(None, ge=1, description="threads of torch during the run; None leaves them as they are")
    peers: tuple[str, ...] = Field((), description="names of `peers.PEERS`, measured in the same run")
    cost_ratios: bool = Field(True, description="also measure vanilla SD at its fastest gamma, which cost ratios refer to")
    memory: bool = Field(False, description="first decode the longest prompt with each strategy, to see its peak memory")
    quality_floor: QualityFloor = Field(QUALITY_FLOOR, description="what a lossy strategy must keep")
    concurrency: int = Field(8, ge=2, description="requests at once, of a bench of throughput")


DEFAULTS = BenchSettings()
