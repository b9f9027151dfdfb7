"""Checks, the verdict that they add up to, and the thresholds that they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from serving.errors import DraftwellError


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of promotion, as registry/gates.yaml explains them; one that is None is not checked."""

    max_regression: float | None = None
    min_speedup_lower_bound: float | None = None
    lossless_identical: bool = False
    min_acceptance_ratio: float | None = None
    min_quality_ratio: float | None = None
    max_p95_tpot_ratio: float | None = None
    max_prediction_loss_ratio: float | None = None
    max_bundle_mb: float | None = None
    max_startup_seconds: float | None = None

    @classmethod
    def of(cls, gates: Mapping[str, Any]) -> Thresholds:
        """Those of a gates file.

        Raises:
            DraftwellError: a threshold that no check reads.
        """
        if unknown := sorted(set(gates) - {field.name for field in fields(cls)}):
            raise DraftwellError(f"no check reads the threshold {', '.join(unknown)}: add it to Thresholds in components/gate/verdict.py "
                                 "or remove it from registry/gates.yaml", code="unknown_threshold")
        return cls(**gates)


@dataclass(frozen=True)
class Check:
    """One value against its threshold; `detail` is the same as text.

    Args:
        transient: it failed because the machine lacked something at that moment (memory, traces, time), not because of the candidate.
    """

    name: str
    value: float
    threshold: float
    passed: bool
    detail: str
    transient: bool = False


@dataclass(frozen=True)
class GateVerdict:
    """All checks, and what could not be checked."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there were checks and none failed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def __add__(self, other: GateVerdict) -> GateVerdict:
        """Both together."""
        return GateVerdict((*self.checks, *other.checks), (*self.notes, *other.notes))
