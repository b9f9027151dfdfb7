"""Values with intervals, taken from the report of a cell's bench: bootstraps over prompts, 5 % left out at each end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from components.bench.schema import BenchEntry, PromptRow
from components.papers.cells import Cell
from components.papers.tables import Row
from components.report.intervals import bootstrap_of_sums, paired_bootstrap_ratio, resamples_for

TAIL = 0.05

Sums = np.ndarray
"""`[..., 5]`: seconds, tokens, target calls, accepted, judged."""


class Estimate(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


class Measured:
    """The entries of a cell's report, by role.

    Args:
        entries: label → entry, as the bench reports them.
    """

    def __init__(self, cell: Cell, entries: dict[str, BenchEntry]):
        self.cell, self.entries, self.labels = cell, entries, cell.labels()

    def label(self, role: str) -> str:
        """The contender that plays a role: the one with the fewest seconds per token."""
        return min(self.labels[role], key=lambda label: pace(self.entries[label].per_prompt))

    def entry(self, role: str) -> BenchEntry:
        """Its entry."""
        return self.entries[self.label(role)]

    def estimate(self, row: Row) -> Estimate | None:
        """The value of a row; None where there is none, such as the accuracy of answers that nobody can check."""
        mine = self.entry(row.role)
        base = None if row.against is None else self.entry(row.against)
        if row.metric == "speed":
            return speed(mine, base or self.entry("plain"))
        if row.metric == "accuracy":
            return accuracy(mine)
        if row.metric == "rouge":
            return None if mine.rouge_l is None or base is None or base.rouge_l is None else alone(mine.rouge_l - base.rouge_l)
        if row.metric == "ttft":
            if mine.ttft_ms is None or base is None or not base.ttft_ms:
                return None
            return ratio_of_medians([p.ttft_ms for p in mine.per_prompt], [p.ttft_ms for p in base.per_prompt])
        if row.metric == "argmax":
            return None if base is None else argmax_difference(mine, base)
        if row.metric == "efficiency":
            return efficiency(mine)
        return counted(SHARES[row.metric], mine.per_prompt, None if base is None else base.per_prompt)


def pace(rows: Sequence[PromptRow]) -> float:
    """Seconds per emitted token."""
    return sum(row.seconds for row in rows) / max(1, sum(row.tokens for row in rows))


def speed(mine: BenchEntry, base: BenchEntry) -> Estimate:
    """How many times as fast one entry is as another."""
    return Estimate(*paired_bootstrap_ratio([row.seconds for row in base.per_prompt], [row.tokens for row in base.per_prompt],
                                            [row.seconds for row in mine.per_prompt], [row.tokens for row in mine.per_prompt], tail=TAIL))


def calls(sums: Sums) -> np.ndarray:
    """Target calls per emitted token."""
    return np.asarray(sums[..., 2] / sums[..., 1])


def mat(sums: Sums) -> np.ndarray:
    """Accepted draft tokens per token that was sampled from the target."""
    return np.asarray(sums[..., 3] / (sums[..., 1] - sums[..., 3]))


def acceptance(sums: Sums) -> np.ndarray:
    """Accepted / judged draft tokens."""
    return np.asarray(sums[..., 3] / sums[..., 4])


SHARES: dict[str, Callable[[Sums], np.ndarray]] = {"calls": calls, "mat": mat, "acceptance": acceptance}


def counted(measure: Callable[[Sums], np.ndarray], mine: Sequence[PromptRow], base: Sequence[PromptRow] | None) -> Estimate | None:
    """A ratio of counts, or what it is over another contender's on the same prompts; None where it is undefined."""
    table = np.concatenate([sums_of(mine), sums_of(mine if base is None else base)], axis=1)

    def metric(sums: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = measure(sums[..., :5])
            return (value if base is None else value / measure(sums[..., 5:]))[..., None]

    value = float(metric(table.sum(0)[None])[0, 0])
    if not np.isfinite(value):
        return None
    low, high = bootstrap_of_sums(table, lambda sums: np.where(np.isfinite(found := metric(sums)), found, np.nan),
                                  resamples=resamples_for(TAIL, len(table)), tail=TAIL)
    return Estimate(value, float(low[0]), float(high[0]))


def argmax_difference(mine: BenchEntry, base: BenchEntry) -> Estimate | None:
    """Share of emitted tokens that are the target's first choice after the same tokens, less another contender's on the same prompts;
    None where the report did not count them."""
    sides = [[(row.target_argmax, row.tokens) for row in entry.per_prompt] for entry in (mine, base)]
    if not sides[0] or any(matches is None for side in sides for matches, _ in side):
        return None
    table = np.concatenate([np.array(side, dtype=np.float64) for side in sides], axis=1)

    def metric(sums: np.ndarray) -> np.ndarray:
        return np.asarray(sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3])[..., None]

    low, high = bootstrap_of_sums(table, metric, resamples=resamples_for(TAIL, len(table)), tail=TAIL)
    return Estimate(float(metric(table.sum(0)[None])[0, 0]), float(low[0]), float(high[0]))


def efficiency(entry: BenchEntry) -> Estimate | None:
    """Accepted / drafted tokens.

    Reports have drafted tokens in total only: the interval takes those of a prompt in proportion to its target calls, which with drafts of
    fixed length they are but for a last draft that the budget cuts short.
    """
    value, spread = entry.draft_efficiency, counted(per_call, entry.per_prompt, None)
    if value is None or spread is None or spread.value <= 0:
        return None
    return Estimate(value, value * spread.low / spread.value, value * spread.high / spread.value)


def per_call(sums: Sums) -> np.ndarray:
    """Accepted draft tokens per target call."""
    return np.asarray(sums[..., 3] / sums[..., 2])


def sums_of(rows: Sequence[PromptRow]) -> np.ndarray:
    """`[prompts, 5]` float64."""
    return np.array([(row.seconds, row.tokens, row.target_calls, row.accepted, row.judged) for row in rows], dtype=np.float64)


def accuracy(entry: BenchEntry) -> Estimate | None:
    """Difference of the share of right answers from plain decoding's, over the tasks whose answers can be checked."""
    known = [task for task in entry.tasks.values() if task.difference is not None and task.low is not None and task.high is not None]
    total = sum(task.count for task in known)
    if not total:
        return None
    return Estimate(*(sum(getattr(task, name) * task.count for task in known) / total for name in ("difference", "low", "high")))


def ratio_of_medians(mine: Sequence[float], base: Sequence[float], *, resamples: int = 2000) -> Estimate:
    """A median over another one's, both over the same prompts."""
    table = np.array([mine, base])
    drawn = table[:, np.random.default_rng(0).integers(0, table.shape[1], size=(resamples, table.shape[1]))]
    middle, ends = np.median(table, axis=-1), np.median(drawn, axis=-1)
    low, high = np.quantile(ends[0] / ends[1], [TAIL, 1 - TAIL])
    return Estimate(float(middle[0] / middle[1]), float(low), float(high))


def alone(value: float) -> Estimate:
    """A value without an interval."""
    return Estimate(value, value, value)
