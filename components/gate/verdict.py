"""Checks, the verdict that they add up to, and the thresholds that they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from draftwell.serving.errors import DraftwellError

Result = Literal["passed", "failed", "not enough evidence"]
PASSED: Result = "passed"
FAILED: Result = "failed"
UNDECIDED: Result = "not enough evidence"


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of promotion, as registry/gates.yaml explains them; one that is None is not
    checked."""

    max_regression: float | None = None
    min_speedup_lower_bound: float | None = None
    lossless_identical: bool = False
    min_acceptance_ratio: float | None = None
    min_quality_ratio: float | None = None
    min_weights_agreement: float | None = None
    # read by the bench of the gate, which marks whether the floors are held
    max_rouge_l_loss: float | None = None
    max_surprisal_shift: float | None = None
    max_tpot_ratio: float | None = None
    max_prediction_loss_ratio: float | None = None
    max_bundle_mb: float | None = None
    max_startup_seconds: float | None = None
    unknown_prompts: Literal["warn", "refuse"] = "warn"

    @classmethod
    def of(cls, gates: Mapping[str, Any]) -> Thresholds:
        """Those of a gates file.

        Raises:
            DraftwellError: a threshold that no check reads.
        """
        if unknown := sorted(set(gates) - {field.name for field in fields(cls)}):
            raise DraftwellError(
                f"no check reads the threshold {', '.join(unknown)}: add it to Thresholds "
                "in components/gate/verdict.py "
                "or remove it from registry/gates.yaml",
                code="unknown_threshold",
            )
        return cls(**gates)


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
    detail: str
    transient: bool = False
    enough: bool = True
    prompts_needed: int | None = None

    @property
    def result(self) -> Result:
        """One of the three verdicts."""
        return PASSED if self.passed else FAILED if self.enough else UNDECIDED


@dataclass(frozen=True)
class GateVerdict:
    """All checks, and what could not be checked."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def result(self) -> Result:
        """Failed if any check failed, or there was none; else not enough evidence if any lacked
        it."""
        results = {check.result for check in self.checks}
        return (
            PASSED
            if results == {PASSED}
            else FAILED
            if FAILED in results or not results
            else UNDECIDED
        )

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

    def __add__(self, other: GateVerdict) -> GateVerdict:
        """Both together."""
        return GateVerdict((*self.checks, *other.checks), (*self.notes, *other.notes))
