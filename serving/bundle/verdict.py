"""The verdict of a gate: its thresholds, and its checks as the gate makes and keeps them.

It stands here because the gate (components) and the registry share it and never import each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Result = Literal["passed", "failed", "not enough evidence"]
PASSED: Result = "passed"
FAILED: Result = "failed"
UNDECIDED: Result = "not enough evidence"


@dataclass(frozen=True)
class Check:
    """One value against its threshold; `detail` is the same as text.

    Args:
        passed: whether the value keeps the threshold, beyond doubt where it is a measurement with
            an interval.
        transient: it failed because the machine lacked something at that moment (memory, traces,
            time), not because of the candidate.
        enough: False where the interval holds values on both sides of the threshold: it neither
            passed nor failed.
        prompts_needed: estimate of the prompts that would decide, where `enough` is False; None
            where it is too many, or unknown.
    """

    name: str
    value: float
    threshold: float
    passed: bool
    detail: str = ""
    transient: bool = False
    enough: bool = True
    prompts_needed: int | None = None

    @property
    def result(self) -> Result:
        """One of the three verdicts."""
        return PASSED if self.passed else FAILED if self.enough else UNDECIDED


@dataclass(frozen=True)
class Skipped:
    """A check that did not run.

    Args:
        name: that it would have had.
        why: in words.
        applies: False where it has no meaning for this release: nobody can require it then.
    """

    name: str
    why: str
    applies: bool = True


def result_of(checks: Iterable[Check]) -> Result:
    """Failed if any check failed, or there was none; else not enough evidence if any lacked it.

    >>> result_of([])
    'failed'
    """
    results = {check.result for check in checks}
    if results == {PASSED}:
        return PASSED
    return FAILED if FAILED in results or not results else UNDECIDED


@dataclass(frozen=True)
class GateVerdict:
    """All checks, remarks, and what was not checked (`settled` says what that comes to)."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Check | Skipped | str | None]) -> GateVerdict:
        """Checks, notes and what was skipped in their order; None is left out."""
        found = list(parts)
        return cls(
            tuple(part for part in found if isinstance(part, Check)),
            tuple(part for part in found if isinstance(part, str)),
            tuple(part for part in found if isinstance(part, Skipped)),
        )

    @property
    def result(self) -> Result:
        """Failed if any check failed, or there was none; else not enough evidence if any lacked
        it."""
        return result_of(self.checks)

    @property
    def passed(self) -> bool:
        """Whether there were checks and all passed."""
        return self.result == PASSED

    @property
    def prompts_needed(self) -> int | None:
        """The most that any check without enough evidence asks for; None where one cannot say, or
        none lacks it."""
        wanted = [check.prompts_needed for check in self.checks if not check.enough]
        return (
            None
            if None in wanted
            else max((number for number in wanted if number is not None), default=None)
        )

    def renamed(self, name: str) -> GateVerdict:
        """The same with another name of each check; `{}` in it stands for the present one."""
        checks = tuple(replace(one, name=name.format(one.name)) for one in self.checks)
        skipped = tuple(replace(one, name=name.format(one.name)) for one in self.skipped)
        return GateVerdict(checks, self.notes, skipped)

    def __add__(self, other: GateVerdict) -> GateVerdict:
        """Both together."""
        return GateVerdict(
            (*self.checks, *other.checks),
            (*self.notes, *other.notes),
            (*self.skipped, *other.skipped),
        )


class Thresholds(BaseModel):
    """Thresholds of promotion, as registry/gates.yaml explains them; one that is None is not
    checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_regression: float | None = Field(
        None, ge=0, lt=1, description="share by which a candidate may be slower than the champion"
    )
    min_speedup_lower_bound: float | None = Field(
        None, ge=0, description="lower end of the speedup over autoregressive"
    )
    lossless_identical: bool = Field(
        False, description="lossless strategies give autoregressive's tokens in float32"
    )
    min_quality_ratio: float | None = Field(
        None, ge=0, le=1, description="quality of a lossy strategy over autoregressive's"
    )
    min_weights_agreement: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of positions where a target with rounded weights chooses the "
        "full weights' token",
    )
    max_rouge_l_loss: float | None = Field(
        None,
        ge=0,
        description="ROUGE-L points that a lossy strategy may lose to autoregressive decoding",
    )
    max_surprisal_shift: float | None = Field(
        None,
        ge=0,
        description="nats a token by which the target may find a lossy strategy's samples more or "
        "less likely than samples of its own",
    )
    max_tpot_ratio: float | None = Field(
        None,
        gt=0,
        description="time per output token over autoregressive's, the mean over requests",
    )
    max_prediction_loss_ratio: float | None = Field(
        None,
        ge=1,
        description="log loss of table and verifier over the champion's, on the same traces",
    )
    max_bundle_mb: float | None = Field(
        None,
        gt=0,
        description="size of the bundle without the models that are fetched, in 10^6 bytes",
    )
    max_startup_seconds: float | None = Field(
        None, gt=0, description="from the start of a process to its first tokens from the bundle"
    )
    unknown_prompts: Literal["warn", "refuse"] = Field(
        "warn",
        description="what becomes of a release with something whose training "
        "prompts are not all recorded",
    )
    required: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="device, or engine → names of checks that must have run; others may be skipped",
    )


def settled(
    verdict: GateVerdict, thresholds: Thresholds, device: str, reason: str | None = None
) -> GateVerdict:
    """A verdict in which each check that did not run is a note, or not enough evidence where it is
    required. So is a required one of which nobody said why it did not run.

    Args:
        device: a key of `Thresholds.required`.
        reason: why a person lets a release pass without them; it becomes part of the notes.
    """
    required = thresholds.required.get(device, ())
    names = [*(one.name for one in verdict.checks), *(one.name for one in verdict.skipped)]
    absent = [
        Skipped(name, "it did not run (gates.yaml may have no threshold for it)")
        for name in required
        if not any(is_called(one, name) for one in names)
    ]
    parts: list[Check | str] = [*verdict.checks, *verdict.notes]
    for one in (*verdict.skipped, *absent):
        needed = one.applies and any(is_called(one.name, name) for name in required)
        if needed and not reason:
            detail = f"{one.why}; `draftwell gate --set unmeasured=REASON` lets it pass"
            parts.append(Check(one.name, 0, 1, False, detail, transient=True, enough=False))
        else:
            let = f"; let pass: {reason}" if needed else ""
            parts.append(f"{one.name} not checked: {one.why}{let}")
    return GateVerdict.of(parts)


def is_called(check: str, name: str) -> bool:
    """Whether a check has a name, or one of its variants does.

    >>> [is_called(one, "speed") for one in ("sampled speed", "speed, 8 at once", "top speedup")]
    [True, True, False]
    """
    return f" {check}".endswith(f" {name}") or check.startswith(f"{name}, ")


class JudgedRecord(BaseModel):
    """What every gate keeps of its verdict; what it is valid for stands in the subclasses."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    passed: bool
    checks: tuple[Check, ...] = Field(description="all that were made")

    @property
    def unmet(self) -> list[Check]:
        """The checks that were not passed."""
        return [check for check in self.checks if not check.passed]

    @property
    def result(self) -> Result:
        """passed, failed or not enough evidence."""
        return PASSED if self.passed and not self.unmet else result_of(self.unmet)

    @property
    def undecided(self) -> bool:
        """Whether it failed for nothing but what the machine lacked at that moment: it may be
        judged again."""
        return bool(self.unmet) and all(check.transient for check in self.unmet)

    def refusal(self) -> str | None:
        """Why it lets nothing pass, or None."""
        if self.result == PASSED:
            return None
        if self.result == UNDECIDED:
            needed = [check.prompts_needed for check in self.unmet if check.prompts_needed]
            hint = f"; an estimated {max(needed)} prompts would decide" if needed else ""
            names = ", ".join(check.name for check in self.unmet)
            return f"its gate had not enough evidence ({names}{hint})"
        failed = ", ".join(check.name for check in self.unmet if check.enough)
        return f"its gate failed ({failed or 'as a whole'})"
