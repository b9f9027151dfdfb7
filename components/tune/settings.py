"""Settings of a tuning: the one place for each default, the same for the command line, the flows
and the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from draftwell.serving.settings import Settings


class _TuneSettings(Settings):
    called, error_code = "tuning setting", "bad_tune_setting"


LIMITS = (
    (
        "quality_loss",
        "max_quality_loss",
        "it loses {:.3f} of the target's own tokens, and at most {:g} is allowed",
    ),
    (
        "rouge_l_lost",
        "max_rouge_l_loss",
        "it loses {:.1f} points of ROUGE-L, and at most {:g} are allowed",
    ),
    (
        "surprisal_shift",
        "max_surprisal_shift",
        "the target finds its samples {:.3f} nats a token more or less likely than plain "
        "decoding's, and at most {:g} are allowed",
    ),
    (
        "cost_ratio",
        "max_cost_ratio",
        "it costs {:.2f} times the target calls of vanilla SD, and at most {:g} times is allowed",
    ),
)
"""A metric, the field with its limit, and what to say of one that is above it."""


class Constraints(_TuneSettings):
    """Limits that a choice must keep to."""

    lossless_only: bool = Field(True, description="choose among lossless strategies only")
    max_quality_loss: float | None = Field(
        None,
        ge=0,
        le=1,
        description="of a lossy choice: relative loss, at most, in the share of "
        "tokens that are the target's argmax, compared with plain decoding; None: no limit",
    )
    max_rouge_l_loss: float | None = Field(
        None,
        ge=0,
        description="ROUGE-L points that a lossy choice may lose to plain decoding, where "
        "prompts have references; None: no limit",
    )
    max_surprisal_shift: float | None = Field(
        None,
        ge=0,
        description="of a lossy choice for sampled requests: nats a token, at most, by which the "
        "target finds its texts more "
        "or less likely than plain decoding's at the same temperature; None: no limit",
    )
    max_cost_ratio: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="target calls per token, at most, over those of "
        "vanilla SD at its fastest gamma; None: no limit",
    )

    def objection(self, metrics: Mapping[str, Any]) -> str | None:
        """Why metrics of `ConstraintChecker.metrics` break a limit, or None."""
        if not metrics["lossless"] and self.lossless_only:
            return "it is lossy, and only lossless strategies are allowed"
        for name, limit_name, words in LIMITS:
            value, limit = metrics[name], getattr(self, limit_name)
            if value is not None and limit is not None and value > limit:
                return words.format(value, limit)
        return None


class RequestSettings(_TuneSettings):
    """The requests that a choice is for, and how much of their answers is measured."""

    max_tokens: int = Field(
        64,
        ge=1,
        description=(
            "tokens per measured prompt; replay predicts as many, or all that the trace's "
            "texts have"
        ),
    )
    temperature: float = Field(
        0.0,
        ge=0,
        le=2,
        description="of the requests: 0 for greedy ones; above 0 the choice is for all sampled "
        "ones. The trace's must be the same",
    )


class TuneSettings(RequestSettings):
    """What requests a choice is for, how much is tried, and what it must keep to."""

    constraints: Constraints = Field(default_factory=Constraints)
    trials: int | None = Field(
        None,
        ge=1,
        description=(
            "configurations tried by replay, at most, over all strategies; None: all there are"
        ),
    )


DEFAULTS = TuneSettings()
