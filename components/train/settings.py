"""Settings of a verifier's training, with every default in one place: the command, the step and the
flows build them and pass them on."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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

    >>> VerifierSettings().ratio
    1.2
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: LabelKind = Field(
        LabelKind.RATIO, description="what is predicted: ratio, argmax or soft"
    )
    ratio: float = Field(
        1.2, gt=0, description="lambda of the label ratio, positive (SPRINTER, section A.10)"
    )
    eta_fp: float | None = Field(
        0.1,
        ge=0,
        le=1,
        description="share in [0, 1] of the tokens that should be rejected which the threshold may "
        "keep, on "
        "held-out prompts; None sets the threshold to .5",
    )
    features: Literal["auto"] | tuple[str, ...] = Field(
        "auto",
        description="groups to read (before, after, scalars); auto: the best by cross-validation",
    )
