"""What drift is in numbers: limits, and the report of a check. Plain data; equal reports have equal
digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftwell.components.drift.statistics import Exchanged

DRIFT_VERSION = 1
CHECKS = ("confidence_psi", "acceptance", "table", "verifier", "novelty")
STEADY, DRIFTED, NOT_ENOUGH = "steady", "drift", "not enough yet"


class Record(BaseModel):
    """A part of a report: fixed, and nothing unknown in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DriftLimits(Record):
    """What counts as drift; `registry/drift.yaml` explains each."""

    false_alarm_rate: float = Field(
        gt=0, le=0.2, description="chance, at most, that a check of unchanged traffic says drift"
    )
    resamples: int = Field(ge=99, description="random exchanges of prompts for each p value")
    min_prompts: int = Field(ge=3, description="different prompts that the feedback must have")
    min_reference: int = Field(ge=3, description="different prompts that the reference must have")
    min_positions: int = Field(ge=1, description="drafted positions that each side must have")
    window: int = Field(ge=3, description="newest prompts of the spool that are looked at")
    stale_after_hours: float = Field(
        24, gt=0, description="of older traffic nothing is called steady"
    )
    confidence_psi: float = Field(
        ge=0, description="population stability index of the draft's confidence"
    )
    acceptance: float = Field(ge=0, le=1, description="change of the acceptance rate")
    table: float = Field(ge=0, le=1, description="mean error of acceptance by confidence bin")
    verifier: float = Field(
        ge=0, le=1, description="rise of the verifier's expected calibration error"
    )
    novelty: float = Field(
        ge=0, le=1, description="rise of the share of rejections with an unknown pattern"
    )
    repeat_after_hours: float = Field(
        gt=0, description="the same drift is not announced again before"
    )
    keep_days: float = Field(
        30,
        gt=0,
        description="days after which recalibrations, and references of releases that serve no "
        "longer, are deleted",
    )

    @model_validator(mode="after")
    def fine_enough(self) -> DriftLimits:
        """So few exchanges that no p value can be small enough would silently find nothing."""
        needed = math.ceil(len(CHECKS) / self.false_alarm_rate)
        if self.resamples < needed:
            raise ValueError(
                f"resamples must be at least {needed} for a false_alarm_rate of "
                f"{self.false_alarm_rate:g}"
            )
        return self


class Side(Record):
    """One of the two sets.

    `acceptance` is the share of judged tokens that are kept, as an acceptance table counts them; of
    another engine's counters that of the first tokens of drafts.
    """

    digest: str
    prompts: int
    """What is exchanged by chance: prompts, or minutes of counts."""
    positions: int
    """Drafted positions, or drafts that were counted."""
    unit: str = "prompts"
    """What `prompts` counts."""
    confidence: float | None = None
    """Mean confidence C of the draft."""
    acceptance: float | None = None


class DriftCheck(Record):
    """One figure against its limit and against chance."""

    name: str
    value: float
    limit: float
    chance: float
    """Median of the figure when prompts change sides at random."""
    p_value: float
    p_needed: float
    """Permitted rate of false alarms over the number of checks."""
    drifted: bool
    words: str

    @classmethod
    def of(
        cls, name: str, found: Exchanged, limit: float, p_needed: float, words: str
    ) -> DriftCheck:
        """Drifted where the figure reaches its limit and chance is excluded."""
        return cls(
            name=name,
            value=found.value,
            limit=limit,
            chance=found.chance,
            p_value=found.p_value,
            p_needed=p_needed,
            drifted=found.value >= limit and found.p_value <= p_needed,
            words=words,
        )


class AcceptanceBin(Record):
    """Acceptance of draft tokens whose confidence is in [low, high)."""

    low: float
    high: float
    table: float | None
    """The champion's table: accepted over judged; None where it has seen nothing, or there is
    none."""
    then: float | None
    """The same in the reference."""
    now: float | None
    """The same in the feedback."""
    now_low: float | None
    """Lower end of its 95 % interval, a bootstrap over prompts."""
    now_high: float | None
    positions: int
    """Of the feedback in this bin."""


class VerifierFigures(Record):
    """Calibration of the champion's verifier; `then` on prompts of the reference that it did not
    learn from."""

    brier_then: float
    brier_now: float
    error_then: float
    """Expected calibration error over ten bins."""
    error_now: float
    prompts_then: int


class NoveltyFigures(Record):
    """Share of rejections whose pattern (draft token, correction) is unknown."""

    memory: float | None
    """Of the feedback's rejections, not in the champion's memory; None without one."""
    then: float
    """One half of the reference's prompts, not seen in the other half."""
    now: float
    """The feedback, not seen in that other half."""


def conclude(
    missing: Sequence[str], checks: Sequence[DriftCheck], doubts: Sequence[str] = ()
) -> dict[str, Any]:
    """`verdict`, `reasons` and `checks` of a report: too little decides nothing; doubts do not rule
    out a drift, but nothing is called steady then."""
    past = tuple(check.words for check in checks if check.drifted)
    if missing:
        verdict, reasons = NOT_ENOUGH, tuple(missing)
    elif past:
        verdict, reasons = DRIFTED, past
    elif doubts:
        verdict, reasons = NOT_ENOUGH, tuple(doubts)
    else:
        said = f"none of {len(checks)} checks found more than chance and its limit allow"
        verdict, reasons = STEADY, (said,)
    return {"verdict": verdict, "reasons": reasons, "checks": tuple(checks)}


class DriftReport(Record):
    """What was found. `digest` is over all of it."""

    schema_version: int = DRIFT_VERSION
    pair: str
    fingerprint: str
    baseline: str
    """What was calibrated on the reference, such as a release."""
    kinds: tuple[str, ...]
    reference: Side
    feedback: Side
    limits: DriftLimits
    verdict: Literal["steady", "drift", "not enough yet"]
    reasons: tuple[str, ...]
    checks: tuple[DriftCheck, ...] = ()
    bins: tuple[AcceptanceBin, ...] = ()
    confidence_then: tuple[float, ...] = ()
    """Share of positions in each of the table's bins of confidence."""
    confidence_now: tuple[float, ...] = ()
    verifier: VerifierFigures | None = None
    novelty: NoveltyFigures | None = None
    notes: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """The reasons in a line."""
        return "; ".join(self.reasons)

    @property
    def drifted(self) -> bool:
        """Whether the verdict is drift."""
        return self.verdict == DRIFTED

    @property
    def digest(self) -> str:
        """sha256 over the report."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()
