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
from draftwell.components.papers.cells import PLAIN, Cell
from draftwell.components.report.intervals import (
    TAIL,
    bootstrap_of_sums,
    paired_bootstrap_ratio,
    resamples_for,
)

DRAFT_FIRST = ("pearl", "duo_decoding")
"""Strategies that draft while the target reads the prompt, or before: their first token is one that
follows a draft, too."""
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
Sides = tuple[float | None, ...]
"""Of one text: what is counted and what it is divided by."""


class Estimate(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


COUNTS: dict[str, Callable[[PromptRow, int], Sides]] = {
    "calls": lambda row, first: (row.target_calls, row.tokens),
    "mat": lambda row, first: (row.accepted, row.tokens - row.accepted - min(row.tokens, first)),
    "acceptance": lambda row, first: (row.accepted, row.judged),
    "efficiency": lambda row, first: (row.accepted, row.target_calls),
    "argmax": lambda row, first: (row.target_argmax, row.tokens),
    "log_likelihood": lambda row, first: (row.log_likelihood, row.tokens),
    "rouge_l": lambda row, first: (row.rouge_l, 1),
    "rouge_l_ratio": lambda row, first: (row.rouge_l, 1),
}
"""Metric → its two sums, of a text and the tokens (0 or 1) that its prompt's reading brought."""
DIFFERENCES = ("argmax", "rouge_l", "log_likelihood")
"""Metrics whose base is subtracted; all others are divided by theirs."""
SEQUENCES: dict[str, tuple[bool, bool]] = {
    "one_kept": (False, True),
    "one_lost": (False, False),
    "several_kept": (True, True),
    "several_lost": (True, False),
}
"""Metric → whether several sequences were drafted, and whether the first one's first token was
kept."""


class Measured:
    """The entries of a cell's report, by role.

    Args:
        entries: label → entry, as the bench reports them.
    """

    def __init__(self, cell: Cell, entries: dict[str, BenchEntry]):
        self.cell, self.entries, self.labels = cell, entries, cell.labels()

    def label(self, role: str) -> str:
        """The contender that plays a role, the one that decodes fastest; a role may be one
        contender's spec."""
        labels = self.labels.get(role) or [self.cell.label_of(role)]
        return min(labels, key=lambda label: pace(self.entries[label].per_prompt))

    def entry(self, role: str) -> BenchEntry:
        """Its entry."""
        return self.entries[self.label(role)]

    def has(self, role: str) -> bool:
        """Whether a role, or a contender's spec, was measured: a quick run has fewer."""
        try:
            return self.label(role) in self.entries
        except KeyError:
            return False

    def settings(self, role: str, over: str) -> str:
        """Draft lengths and thresholds of the contenders that a row compares, such as `τ 0.5; SD: γ
        5`."""
        mine = settings_of(self.entry(role))
        other = settings_of(self.entry(over)) if over and ":" not in over else ""
        return "; ".join(filter(None, (mine, f"{over}: {other}" if other else "")))


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
        # a threshold that was searched for has 17 digits
        f"{names[name]} {str(value)[:6]}"
        for name, value in entry.parameters.items()
        if name in names
    )


def estimate(metric: str, mine: BenchEntry, base: BenchEntry | None = None) -> Estimate | None:
    """A metric of one entry, or what it is over (or less) another's on the same prompts; None where
    it is undefined, such as words in common with a reference that no prompt has."""
    if metric in ("speed", "request"):
        return None if base is None else speed(mine, base, whole=metric == "request")
    if metric == "ttft":
        return None if base is None else ratio_of_medians(mine, base)
    if metric in SEQUENCES:
        return of_sums(mine, [sequence_share(row, *SEQUENCES[metric]) for row in mine.per_prompt])
    if metric == "wins":
        return (
            None
            if base is None
            else of_sums(mine, list(map(won, mine.per_prompt, base.per_prompt)))
        )
    if metric == "efficiency":
        return efficiency(mine, base)
    return counted(metric, mine, base)


def counted(metric: str, mine: BenchEntry, base: BenchEntry | None) -> Estimate | None:
    """A metric of `COUNTS`."""
    columns = [
        [COUNTS[metric](row, 0 if drafts_first(entry) else 1) for row in entry.per_prompt]
        for entry in (mine, base)
        if entry is not None
    ]
    rows = [sum(sides, ()) for sides in zip(*columns, strict=True)]
    return of_sums(mine, rows, less=metric in DIFFERENCES)


def of_sums(entry: BenchEntry, rows: Sequence[Sides], *, less: bool = False) -> Estimate | None:
    """A sum over another one, or that over (or less) a second such quotient; texts without a value
    are left out.

    Args:
        rows: of each text `(a, b)`, or `(a, b, c, d)`: Σa / Σb over, or less, Σc / Σd.
    """
    known = [(row, one) for row, one in zip(rows, entry.per_prompt, strict=True) if None not in row]
    if not known:
        return None
    table = by_prompt(
        np.array([row for row, _ in known], float), [one.prompt_id for _, one in known]
    )

    def measure(sums: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = sums[..., 0] / sums[..., 1]
            if sums.shape[-1] > 2:
                other = sums[..., 2] / sums[..., 3]
                value = value - other if less else value / other
        return np.where(np.isfinite(value), value, np.nan)[..., None]

    value = float(measure(table.sum(0)[None])[0, 0])
    if not np.isfinite(value):
        return None
    low, high = bootstrap_of_sums(
        table, measure, resamples=resamples_for(TAIL, len(table)), tail=TAIL
    )
    return Estimate(value, float(low[0]), float(high[0]))


def decoding(row: PromptRow) -> tuple[float, int]:
    """Seconds and tokens behind the first token; the prompt's reading by the target is left out."""
    return row.seconds - row.ttft_ms / 1e3, row.tokens - 1


def pace(rows: Sequence[PromptRow]) -> float:
    """Seconds per token of decoding alone; of whole requests where none has a second token."""
    seconds, tokens = (sum(column) for column in zip(*map(decoding, rows), strict=True))
    if tokens > 0:
        return float(seconds / tokens)
    return sum(row.seconds for row in rows) / max(1, sum(row.tokens for row in rows))


def speed(mine: BenchEntry, base: BenchEntry, *, whole: bool = False) -> Estimate | None:
    """How many times as fast one entry decodes as another, on the prompts that have a second token
    from both; None where none has.

    Args:
        whole: of whole requests, the prompt's reading included.
    """
    known = [
        (one, other)
        for one, other in zip(mine.per_prompt, base.per_prompt, strict=True)
        if whole or min(one.tokens, other.tokens) > 1
    ]
    if not known:
        return None

    def side(row: PromptRow) -> tuple[float, int]:
        return (row.seconds, row.tokens) if whole else decoding(row)

    table = np.array([(*side(other), *side(one)) for one, other in known])
    ids = [one.prompt_id for one, _ in known]
    return Estimate(*paired_bootstrap_ratio(*by_prompt(table, ids).T, tail=TAIL))


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


def sequence_share(row: PromptRow, several: bool, kept: bool) -> Sides:
    """Rounds of one kind, and all in which a sequence's first token was judged."""
    if not row.sequences:
        return (None, None)
    of_kind = [counts for number, counts in row.sequences.items() if (number > 1) == several]
    return sum(counts[0 if kept else 1] for counts in of_kind), sum(
        map(sum, row.sequences.values())
    )


def won(mine: PromptRow, base: PromptRow) -> Sides:
    """Whether a text has as many words in common with the reference as another, or more."""
    if mine.rouge_l is None or base.rouge_l is None:
        return (None, None)
    return float(mine.rouge_l >= base.rouge_l), 1.0


def efficiency(entry: BenchEntry, base: BenchEntry | None = None) -> Estimate | None:
    """Accepted / drafted tokens, or how many times another entry's they are.

    Reports have drafted tokens in total only: the interval takes those of a prompt in proportion to
    its target calls, which with drafts of fixed length they are but for a last draft that the
    budget cuts short.
    """
    value, spread = entry.draft_efficiency, counted("efficiency", entry, base)
    if base is not None and value is not None:
        value = value / base.draft_efficiency if base.draft_efficiency else None
    if value is None or spread is None or spread.value <= 0:
        return None
    return Estimate(value, value * spread.low / spread.value, value * spread.high / spread.value)


def drafts_first(entry: BenchEntry) -> bool:
    """Whether the target's reading of the prompt also judges a draft."""
    return (
        entry.strategy in DRAFT_FIRST or str(entry.parameters.get("draft_first")).lower() == "true"
    )


def ratio_of_medians(mine: BenchEntry, base: BenchEntry, *, resamples: int = 2000) -> Estimate:
    """The median time to the first token over another one's, both over the same prompts."""
    table = np.array([[row.ttft_ms for row in entry.per_prompt] for entry in (mine, base)])
    drawn = table[
        :, np.random.default_rng(0).integers(0, table.shape[1], size=(resamples, table.shape[1]))
    ]
    middle, ends = np.median(table, axis=-1), np.median(drawn, axis=-1)
    low, high = np.quantile(ends[0] / ends[1], [TAIL, 1 - TAIL])
    return Estimate(float(middle[0] / middle[1]), float(low), float(high))


def first_choices(measured: Measured, role: str) -> Estimate | None:
    """The share of tokens that are the target's first choice, less plain decoding's.

    At a temperature plain decoding's text is one draw of many, and so is vanilla SD's: there it is
    less the share of all lossless strategies' texts together.
    """
    mine = measured.entry(role)
    if not measured.cell.temperature:
        return estimate("argmax", mine, measured.entry(PLAIN))
    lossless = [one.per_prompt for one in measured.entries.values() if one.lossless]
    rows: list[Sides] = []
    for row, *others in zip(mine.per_prompt, *lossless, strict=True):
        known = [one.target_argmax for one in others if one.target_argmax is not None]
        base = sum(known) if len(known) == len(others) else None
        rows.append((row.target_argmax, row.tokens, base, sum(one.tokens for one in others)))
    return of_sums(mine, rows, less=True)
