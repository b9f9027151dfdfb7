"""Settings of a verifier's training, with every default in one place: the command, the step and the
flows build them and pass them on."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from draftwell.serving.errors import DraftwellError


class LabelKind(StrEnum):
    """What a verifier learns to predict of a draft token x."""

    RATIO = "ratio"
    """q̄(x)/p̄(x) <= lambda, SPRINTER's own (section 3.2): of the raw distributions, whatever the
    temperature."""
    ARGMAX = "argmax"
    """x is the target's argmax: what is decided at temperature 0, and learnt from traces of
    temperature 0 alone."""
    SOFT = "soft"
    """min(1, p(x)/q(x)) at the trace's temperature, a target between 0 and 1 for the cross-entropy;
    at temperature 0 as `ARGMAX`."""


class VerifierSettings(BaseModel):
    """How a verifier is trained.

    Raises:
        DraftwellError: a ratio or a rate out of range (`out_of_range`).

    >>> VerifierSettings().ratio
    1.2
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: LabelKind = Field(
        LabelKind.RATIO, description="what is predicted: ratio, argmax or soft"
    )
    ratio: float = Field(
        1.2, description="lambda of the label ratio, positive (SPRINTER, section A.10)"
    )
    eta_fp: float | None = Field(
        0.1,
        description="share in [0, 1] of the tokens that should be rejected which the threshold may "
        "keep, on "
        "held-out prompts; None sets the threshold to .5",
    )
    features: Literal["auto"] | tuple[str, ...] = Field(
        "auto",
        description="groups to read (before, after, scalars); auto: the best by cross-validation",
    )
    seed: int = Field(
        0, description="of the split into prompts to train on and to test on, and of the folds"
    )

    @field_validator("ratio")
    @classmethod
    def _positive(cls, ratio: float) -> float:
        if not ratio > 0:
            raise DraftwellError(
                f"ratio (lambda) must be positive, not {ratio}", code="out_of_range"
            )
        return ratio

    @field_validator("eta_fp")
    @classmethod
    def _a_rate(cls, eta_fp: float | None) -> float | None:
        if eta_fp is not None and not 0 <= eta_fp <= 1:
            raise DraftwellError(f"eta_fp must be in [0, 1], not {eta_fp}", code="out_of_range")
        return eta_fp
