"""Checks, and the verdict that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from draftwell.serving.bundle.verdict import (
    FAILED,
    PASSED,
    UNDECIDED,
    Check,
    Result,
    Thresholds,
    result_of,
)

__all__ = ["FAILED", "PASSED", "UNDECIDED", "Check", "GateVerdict", "Result", "Thresholds"]


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
