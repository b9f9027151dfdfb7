"""Values with intervals, taken from the report of a cell's bench: bootstraps over prompts, 5 % left
out at each end.

Where each prompt was decoded with several seeds, its rows are one draw (`by_prompt`): how prompts
differ is what an interval is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.papers.cells import PLAIN, PLAIN_SHARE, Cell
from draftwell.components.papers.tables import Metric, Row
from draftwell.components.report.intervals import (
    TAIL,
    bootstrap_of_sums,
    paired_bootstrap_ratio,
    resamples_for,
)

Sums = np.ndarray
"""`[..., 6]`: seconds, tokens, target calls, accepted, judged, tokens that came with the prompt's
reading (`sums_of`)."""
WIDTH = 6
DRAFT_FIRST = ("pearl", "duo_decoding")
"""Strategies that draft while the target reads the prompt, or before: their first token is one that
follows a draft, too."""


class Estimate(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


SHORT = {
    "num_speculative_tokens": "γ",
    "tau": "τ",
    "min_count": "λ",
    "threshold": "λ",
    "max_draft": "at most",
    "tau_target": "τ_T",
    "tau_qualifier": "τ_Q",
    "num_draft_tokens": "l_D",
}
"""Settings that the page shows → their names there. A sample: those of new strategies are not
entered."""


class Measured:
    """The entries of a cell's report, by role.

    Args:
        entries: label → entry, as the bench reports them.
        plain_share: seconds per token of `PLAIN_SHARE`; None where its passes were not timed.
    """

    def __init__(
        self, cell: Cell, entries: dict[str, BenchEntry], plain_share: float | None = None
    ):
        self.cell, self.entries, self.labels, self.plain_share = (
            cell,
            entries,
            cell.labels(),
            plain_share,
        )

    def label(self, role: str) -> str:
        """The contender that plays a role, the one that decodes fastest; a role may be one
        contender's spec."""
        labels = self.labels.get(role) or [self.cell.label_of(role)]
        return min(labels, key=lambda label: pace(self.entries[label].per_prompt))

    def entry(self, role: str) -> BenchEntry:
        """Its entry."""
        return self.entries[self.label(role)]

    def estimate(self, row: Row) -> Estimate | None:
        """The value of a row; None where there is none, such as the accuracy of answers that nobody
        can check."""
        mine = self.entry(row.role)
        if row.against == PLAIN_SHARE:
            return None if self.plain_share is None else speed_over(mine, self.plain_share)
        base = None if row.against is None else self.entry(row.against)
        if row.metric == "speed":
            return speed(mine, base or self.entry(PLAIN))
        if row.metric == "accuracy":
            return accuracy(mine)
        if row.metric == "ttft":
            if mine.ttft_ms is None or base is None or not base.ttft_ms:
                return None
            return ratio_of_medians(
                [p.ttft_ms for p in mine.per_prompt], [p.ttft_ms for p in base.per_prompt]
            )
        if row.metric == "argmax":
            return None if base is None else argmax_difference(mine, base)
        if row.metric == "rouge_l_ratio":
            return None if base is None else rouge_ratio(mine, base)
        if row.metric in ("rouge_1", "rouge_2", "rouge_l", "wins"):
            return None if base is None else overlap(mine, base, row.metric)
        if row.metric in SEQUENCES:
            return sequence_share(mine, *SEQUENCES[row.metric])
        if row.metric == "efficiency":
            return efficiency(mine, base)
        return counted(SHARES[row.metric], mine, base)

    def whole(self, row: Row) -> float | None:
        """A speed with the prompt's reading in it; None of other metrics."""
        if row.metric != "speed" or row.against == PLAIN_SHARE:
            return None
        mine, base = self.entry(row.role).per_prompt, self.entry(row.against or PLAIN).per_prompt
        return whole_pace(base) / whole_pace(mine)

    def settings(self, row: Row) -> str:
        """Draft lengths and thresholds of the contenders that a row compares, such as `τ 0.5; SD: γ
        5`."""
        # in the row's words
        named = row.against is None or ":" in row.against or row.against == PLAIN_SHARE
        against = None if named else row.against
        found = [
            (role, settings_of(self.entry(role)))
            for role in (row.role, against)
            if role is not None
        ]
        return "; ".join(
            text if i == 0 else f"{role}: {text}" for i, (role, text) in enumerate(found) if text
        )


def settings_of(entry: BenchEntry) -> str:
    """An entry's draft length and thresholds.

    >>> settings_of(
    ...     BenchEntry(
    ...         parameters={"num_speculative_tokens": "5", "tau": "0.6", "use_gate": "false"}
    ...     )
    ... )
    'γ 5, τ 0.6'
    >>> settings_of(
    ...     BenchEntry(parameters={"num_draft_tokens": "5", "num_speculative_tokens": "20"})
    ... )
    'l_D 5, l_Q 20'
    """
    names = (
        SHORT | {"num_speculative_tokens": "l_Q"}
        if "num_draft_tokens" in entry.parameters
        else SHORT
    )
    return ", ".join(
        f"{names[name]} {value}" for name, value in entry.parameters.items() if name in names
    )


def decoding(row: PromptRow) -> tuple[float, int]:
    """Seconds and tokens behind the first token; the prompt's reading by the target is left out."""
    return row.seconds - row.ttft_ms / 1e3, row.tokens - 1


def pace(rows: Sequence[PromptRow]) -> float:
    """Seconds per token of decoding alone; of whole requests where none has a second token."""
    seconds, tokens = (sum(column) for column in zip(*map(decoding, rows), strict=True))
    return seconds / tokens if tokens > 0 else whole_pace(rows)


def whole_pace(rows: Sequence[PromptRow]) -> float:
    """Seconds per emitted token of whole requests."""
    return sum(row.seconds for row in rows) / max(1, sum(row.tokens for row in rows))


def speed(mine: BenchEntry, base: BenchEntry) -> Estimate | None:
    """How many times as fast one entry decodes as another, on the prompts that have a second token
    from both; None where none has."""
    known = [
        (one, other)
        for one, other in zip(mine.per_prompt, base.per_prompt, strict=True)
        if min(one.tokens, other.tokens) > 1
    ]
    sides, ids = (
        [(*decoding(other), *decoding(one)) for one, other in known],
        [one.prompt_id for one, _ in known],
    )
    if not sides:
        return None
    return Estimate(*paired_bootstrap_ratio(*by_prompt(np.array(sides), ids).T, tail=TAIL))


def speed_over(mine: BenchEntry, pace: float) -> Estimate | None:
    """How many times as fast an entry decodes as something that takes `pace` seconds a token; None
    where no text has a second one."""
    rows = [row for row in mine.per_prompt if row.tokens > 1]
    sides = [(pace * tokens, seconds) for seconds, tokens in map(decoding, rows)]
    return ratio_of_sums(sides, [row.prompt_id for row in rows]) if rows else None


def by_prompt(table: np.ndarray, prompt_ids: Sequence[str]) -> np.ndarray:
    """Sums `[prompts, width]` over the rows `[rows, width]` of each prompt, in the order in which
    prompts come first.

    >>> by_prompt(np.array([[1.0], [2.0], [4.0]]), ["a", "b", "a"]).tolist()
    [[5.0], [2.0]]
    """
    place = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompt_ids))}
    sums = np.zeros((len(place), table.shape[1]))
    np.add.at(sums, [place[prompt] for prompt in prompt_ids], table)
    return sums


def ids_of(entry: BenchEntry) -> list[str]:
    """The prompt of each of its rows."""
    return [row.prompt_id for row in entry.per_prompt]


def calls(sums: Sums) -> np.ndarray:
    """Target calls per emitted token."""
    return np.asarray(sums[..., 2] / sums[..., 1])


def mat(sums: Sums) -> np.ndarray:
    """Accepted draft tokens per token that was sampled from the target behind a draft."""
    return np.asarray(sums[..., 3] / (sums[..., 1] - sums[..., 3] - sums[..., 5]))


def acceptance(sums: Sums) -> np.ndarray:
    """Accepted / judged draft tokens."""
    return np.asarray(sums[..., 3] / sums[..., 4])


SHARES: dict[str, Callable[[Sums], np.ndarray]] = {
    "calls": calls,
    "mat": mat,
    "acceptance": acceptance,
}


SEQUENCES: dict[str, tuple[bool, bool]] = {
    "one_kept": (False, True),
    "one_lost": (False, False),
    "several_kept": (True, True),
    "several_lost": (True, False),
}
"""Metric → whether several sequences were drafted, and whether the first one's first token was
kept."""


def sequence_share(entry: BenchEntry, several: bool, kept: bool) -> Estimate | None:
    """Share of the rounds in which a sequence's first token was judged; None where none was."""
    rows = [row for row in entry.per_prompt if row.sequences]
    if not rows:
        return None
    counts = [
        (
            sum(
                rounds[0 if kept else 1]
                for count, rounds in (row.sequences or {}).items()
                if (count > 1) == several
            ),
            sum(map(sum, (row.sequences or {}).values())),
        )
        for row in rows
    ]
    return ratio_of_sums(counts, [row.prompt_id for row in rows])


def ratio_of_sums(
    rows: Sequence[tuple[float, float]], prompt_ids: Sequence[str]
) -> Estimate | None:
    """A sum over another one; None where the other is 0.

    >>> ratio_of_sums([(1.0, 2.0), (2.0, 4.0)], ["a", "b"])
    Estimate(value=0.5, low=0.5, high=0.5)
    """
    table = by_prompt(np.array(rows, dtype=np.float64), prompt_ids)

    def metric(sums: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.asarray(sums[..., 0] / sums[..., 1])[..., None]
        return np.where(np.isfinite(found), found, np.nan)

    value = float(metric(table.sum(0)[None])[0, 0])
    if not np.isfinite(value):
        return None
    low, high = bootstrap_of_sums(
        table, metric, resamples=resamples_for(TAIL, len(table)), tail=TAIL
    )
    return Estimate(value, float(low[0]), float(high[0]))


def counted(
    measure: Callable[[Sums], np.ndarray], mine: BenchEntry, base: BenchEntry | None
) -> Estimate | None:
    """A ratio of counts, or what it is over another contender's on the same prompts; None where it
    is undefined."""
    table = np.concatenate([sums_of(mine), sums_of(mine if base is None else base)], axis=1)

    def metric(sums: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = measure(sums[..., :WIDTH])
            return (value if base is None else value / measure(sums[..., WIDTH:]))[..., None]

    value = float(metric(table.sum(0)[None])[0, 0])
    if not np.isfinite(value):
        return None
    low, high = bootstrap_of_sums(
        table,
        lambda sums: np.where(np.isfinite(found := metric(sums)), found, np.nan),
        resamples=resamples_for(TAIL, len(table)),
        tail=TAIL,
    )
    return Estimate(value, float(low[0]), float(high[0]))


def argmax_difference(mine: BenchEntry, base: BenchEntry) -> Estimate | None:
    """Share of emitted tokens that are the target's first choice after the same tokens, less
    another contender's on the same prompts; None where the report did not count them."""
    sides = [
        [(row.target_argmax, row.tokens) for row in entry.per_prompt] for entry in (mine, base)
    ]
    if not sides[0] or any(matches is None for side in sides for matches, _ in side):
        return None
    table = by_prompt(
        np.concatenate([np.array(side, dtype=np.float64) for side in sides], axis=1), ids_of(mine)
    )

    def metric(sums: np.ndarray) -> np.ndarray:
        return np.asarray(sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3])[..., None]

    low, high = bootstrap_of_sums(
        table, metric, resamples=resamples_for(TAIL, len(table)), tail=TAIL
    )
    return Estimate(float(metric(table.sum(0)[None])[0, 0]), float(low[0]), float(high[0]))


class Loss(NamedTuple):
    """What a lossy contender gains and loses.

    Args:
        speed: over SD, of decoding alone.
        lost: share of its tokens that are the target's first choice, less plain decoding's.
    """

    speed: Estimate
    lost: Estimate


def losses(measured: Measured, rows: Sequence[Row]) -> dict[str, Loss]:
    """Role → gain and loss, of the roles whose first choices are counted."""
    found = {}
    for row in rows:
        if row.metric == "argmax" and "SD" in measured.labels:
            gained, lost = (
                speed(measured.entry(row.role), measured.entry("SD")),
                measured.estimate(row),
            )
            if gained is not None and lost is not None:
                found[row.role] = Loss(gained, lost)
    return found


def overlap(mine: BenchEntry, base: BenchEntry, metric: Metric = "rouge_l") -> Estimate | None:
    """ROUGE-1, -2 or -L, points of 100, less another contender's on the same prompts; None where no
    prompt has a reference.

    Args:
        metric: `wins` is the share of prompts on which ROUGE-L is at least the other's.
    """
    name, wins = ("rouge_l", True) if metric == "wins" else (metric, False)
    sides = [
        (one.prompt_id, getattr(one, name), getattr(other, name))
        for one, other in zip(mine.per_prompt, base.per_prompt, strict=True)
    ]
    known = [
        (prompt, one - other)
        for prompt, one, other in sides
        if one is not None and other is not None
    ]
    if not known:
        return None
    return ratio_of_sums(
        [(difference >= 0 if wins else difference, 1.0) for _, difference in known],
        [prompt for prompt, _ in known],
    )


def rouge_ratio(mine: BenchEntry, base: BenchEntry) -> Estimate | None:
    """Mean ROUGE-L over another contender's on the prompts that have a reference; None where none
    has, or the other's is 0."""
    sides = [
        (one.prompt_id, one.rouge_l, other.rouge_l)
        for one, other in zip(mine.per_prompt, base.per_prompt, strict=True)
    ]
    known = [
        (prompt, (one, other))
        for prompt, one, other in sides
        if one is not None and other is not None
    ]
    return (
        ratio_of_sums([points for _, points in known], [prompt for prompt, _ in known])
        if known
        else None
    )


def efficiency(entry: BenchEntry, base: BenchEntry | None = None) -> Estimate | None:
    """Accepted / drafted tokens, or how many times another entry's they are.

    Reports have drafted tokens in total only: the interval takes those of a prompt in proportion to
    its target calls, which with drafts of fixed length they are but for a last draft that the
    budget cuts short.
    """
    value, spread = entry.draft_efficiency, counted(per_call, entry, base)
    if base is not None and value is not None:
        value = value / base.draft_efficiency if base.draft_efficiency else None
    if value is None or spread is None or spread.value <= 0:
        return None
    return Estimate(value, value * spread.low / spread.value, value * spread.high / spread.value)


def per_call(sums: Sums) -> np.ndarray:
    """Accepted draft tokens per target call."""
    return np.asarray(sums[..., 3] / sums[..., 2])


def drafts_first(entry: BenchEntry) -> bool:
    """Whether the target's reading of the prompt also judges a draft."""
    return (
        entry.strategy in DRAFT_FIRST or str(entry.parameters.get("draft_first")).lower() == "true"
    )


def sums_of(entry: BenchEntry) -> np.ndarray:
    """`[prompts, WIDTH]` float64; reading a prompt brings its first token before any draft, but for
    strategies that draft first."""
    first = 0 if drafts_first(entry) else 1
    rows = np.array(
        [
            (
                row.seconds,
                row.tokens,
                row.target_calls,
                row.accepted,
                row.judged,
                min(row.tokens, first),
            )
            for row in entry.per_prompt
        ],
        dtype=np.float64,
    )
    return by_prompt(rows, ids_of(entry))


def accuracy(entry: BenchEntry) -> Estimate | None:
    """Difference of the share of right answers from plain decoding's, over the tasks whose answers
    can be checked."""
    known = [
        task
        for task in entry.tasks.values()
        if task.difference is not None and task.low is not None and task.high is not None
    ]
    total = sum(task.count for task in known)
    if not total:
        return None
    return Estimate(
        *(
            sum(getattr(task, name) * task.count for task in known) / total
            for name in ("difference", "low", "high")
        )
    )


def ratio_of_medians(
    mine: Sequence[float], base: Sequence[float], *, resamples: int = 2000
) -> Estimate:
    """A median over another one's, both over the same prompts."""
    table = np.array([mine, base])
    drawn = table[
        :, np.random.default_rng(0).integers(0, table.shape[1], size=(resamples, table.shape[1]))
    ]
    middle, ends = np.median(table, axis=-1), np.median(drawn, axis=-1)
    low, high = np.quantile(ends[0] / ends[1], [TAIL, 1 - TAIL])
    return Estimate(float(middle[0] / middle[1]), float(low), float(high))
