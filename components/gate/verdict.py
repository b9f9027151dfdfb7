"""Checks, the verdict that they add up to, and the thresholds that they are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from draftwell.serving.bundle.verdict import (
    FAILED,
    PASSED,
    UNDECIDED,
    Check,
    Result,
    result_of,
)
from draftwell.serving.errors import DraftwellError

__all__ = ["FAILED", "PASSED", "UNDECIDED", "Check", "GateVerdict", "Result", "Thresholds"]


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
class GateVerdict:
    """All checks, and what could not be checked."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Check | str | None]) -> GateVerdict:
        """Checks and notes in their order; what does not apply is None."""
        found = list(parts)
        return cls(
            tuple(part for part in found if isinstance(part, Check)),
            tuple(part for part in found if isinstance(part, str)),
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

    def __add__(self, other: GateVerdict) -> GateVerdict:
        """Both together."""
        return GateVerdict((*self.checks, *other.checks), (*self.notes, *other.notes))
