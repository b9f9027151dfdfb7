"""Counters of one generation, and the measures that METHODS defines on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from serving.runtime.types import Draft, Verdict


@dataclass
class Stats:
    """What happened during one generation. Seconds are wall time inside forwards, `wall` is the whole request."""

    emitted: int = 0
    drafted: int = 0
    judged: int = 0
    accepted: int = 0
    rescued: int = 0
    sampled: int = 0
    rounds: int = 0
    target_calls: int = 0
    target_tokens: int = 0
    draft_calls: int = 0
    prefill_calls: int = 0
    judged_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    prefill_seconds: float = 0.0
    wall_seconds: float = 0.0
    first_token_seconds: float = 0.0

    def count(self, draft: Draft, verdict: Verdict) -> None:
        """Count one verification of `draft` (drafters count what they draft)."""
        self.judged += verdict.judged
        self.accepted += verdict.accepted
        self.rescued += verdict.rescued
        self.sampled += verdict.token is not None
        if len(draft):
            self.rounds += 1
        for i in range(len(draft)):
            self.judged_at[i] += 1
            self.accepted_at[i] += i < verdict.accepted

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """Sum of the counters of many generations."""
        result = cls()
        for part in parts:
            for name in cls.__dataclass_fields__:
                setattr(result, name, getattr(result, name) + getattr(part, name))
        return result

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / judged draft tokens; None when nothing was judged."""
        return self.accepted / self.judged if self.judged else None

    @property
    def draft_efficiency(self) -> float | None:
        """Accepted / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mat(self) -> float:
        """Accepted draft tokens / tokens sampled from the target."""
        return self.accepted / self.sampled if self.sampled else float(self.accepted)

    @property
    def accepted_per_call(self) -> float:
        """Accepted draft tokens / target calls."""
        return self.accepted / self.target_calls if self.target_calls else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds that drafted (vLLM's convention)."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def calls_per_token(self) -> float:
        """Target calls / emitted tokens; the numerator of the cost ratio."""
        return self.target_calls / self.emitted if self.emitted else 0.0

    @property
    def overhead_seconds(self) -> float:
        """Wall time outside model forwards (serial schedules only)."""
        return max(0.0, self.wall_seconds - self.target_seconds - self.draft_seconds - self.prefill_seconds)
