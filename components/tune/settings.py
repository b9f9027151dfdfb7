"""Settings of a tuning: the one place for each default, the same for the command line, the flows and the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from components.bench.settings import QUALITY_FLOOR
from serving.errors import DraftwellError

ROUGE_POINTS = QUALITY_FLOOR.max_rouge_l_loss
"""ROUGE-L points that a lossy choice may lose to plain decoding, where prompts have references (docs/benchmarks.md)."""


class _Settings(BaseModel):
    """Frozen and strict; a value out of bounds is refused in one line."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_one_line(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise DraftwellError(f"tuning setting {name}: {first['msg']} (got {first['input']!r})", code="bad_tune_setting") from error


class Constraints(_Settings):
    """Limits that a choice must keep to."""

    lossless_only: bool = Field(True, description="choose among lossless strategies only")
    max_quality_loss: float = Field(
        round(1 - QUALITY_FLOOR.min_argmax_share, 9),
        ge=0,
        le=1,
        description="of a lossy choice: relative loss, at most, in the share of tokens that "
        "are the target's argmax, compared with plain decoding",
    )
    max_cost_ratio: float | None = Field(None, gt=0, allow_inf_nan=False, description="target calls per token, at most, over those of "
                                         "vanilla SD at its fastest gamma; None: no limit")

    def objection(self, metrics: Mapping[str, Any]) -> str | None:
        """Why metrics of `ConstraintChecker.metrics` break a limit, or None."""
        if not metrics["lossless"] and self.lossless_only:
            return "it is lossy, and only lossless strategies are allowed"
        loss, lost, cost = metrics["quality_loss"], metrics["rouge_l_lost"], metrics["cost_ratio"]
        if loss > self.max_quality_loss:
            return f"it loses {loss:.3f} of the target's own tokens, and at most {self.max_quality_loss:g} is allowed"
        if lost is not None and lost > ROUGE_POINTS:
            return f"it loses {lost:.1f} points of ROUGE-L, and at most {ROUGE_POINTS:g} are allowed"
        if self.max_cost_ratio is not None and cost is not None and cost > self.max_cost_ratio:
            return f"it costs {cost:.2f} times the target calls of vanilla SD, and at most {self.max_cost_ratio:g} times is allowed"
        return None


class TuneSettings(_Settings):
    """What is tried, how much is measured, and what a choice must keep to."""

    constraints: Constraints = Field(default_factory=Constraints)
    strategies: tuple[str, ...] | None = Field(None, description="names to choose among; None: all that are allowed and possible")
    trials: int = Field(60, ge=1, description="configurations tried by replay, over all strategies")
    explore: int = Field(5, ge=1, description="configurations of each strategy that no replay predicts; each is measured on 2 prompts")
    measure_top: int = Field(5, ge=1, description="replayed configurations that are measured; of explored ones half as many, rounded up")
    max_tokens: int = Field(64, ge=1, description="tokens per measured prompt; replay predicts as many, or all that the trace's texts have")
    seed: int = 0
    overlap: bool = Field(True, description="whether forward passes that a strategy overlaps run at once")


DEFAULTS = TuneSettings()
