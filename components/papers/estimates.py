"""Values with intervals, taken from the report of a cell's bench: bootstraps over prompts, 5 % left
out at each end.

Where each prompt was decoded with several seeds, its rows are one draw (`by_prompt`): how prompts
differ is what an interval is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.report.intervals import (
    FEWEST_RESAMPLES,
    TAIL,
    bootstrap_of_sums,
    paired_bootstrap_ratio,
    percentile_ends,
    resample,
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
    """A value and the ends of its interval.

    >>> str(Estimate(1.2, 1.1, 1.345))
    '1.20 [1.10, 1.34]'
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def sequence_share(several: bool, kept: bool) -> Callable[[PromptRow, int], Sides]:
    """A metric of `COUNTS`: rounds that drafted one or several sequences and kept or lost the first
    one's first token, and all in which one was judged."""

    def sides(row: PromptRow, _: int) -> Sides:
        if not row.sequences:
            return (None, None)
        rounds = [(number > 1, *counts) for number, counts in row.sequences.items()]
        wanted = sum(one[1 if kept else 2] for one in rounds if one[0] == several)
        return wanted, sum(sum(one[1:]) for one in rounds)

    return sides


COUNTS: dict[str, Callable[[PromptRow, int], Sides]] = {
    "calls": lambda row, first: (row.target_calls, row.tokens),
    "mat": lambda row, first: (row.accepted, row.tokens - row.accepted - min(row.tokens, first)),
    "efficiency": lambda row, first: (row.accepted, row.target_calls),
    "argmax": lambda row, first: (row.target_argmax, row.tokens),
    "log_likelihood": lambda row, first: (row.log_likelihood, row.tokens),
    "rouge_l": lambda row, first: (row.rouge_l, 1),
    "rouge_l_ratio": lambda row, first: (row.rouge_l, 1),
    "one_kept": sequence_share(several=False, kept=True),
    "one_lost": sequence_share(several=False, kept=False),
    "several_kept": sequence_share(several=True, kept=True),
    "several_lost": sequence_share(several=True, kept=False),
}
"""Metric → its two sums, of a text and the tokens (0 or 1) that its prompt's reading brought."""
DIFFERENCES = ("argmax", "rouge_l", "log_likelihood")
"""Metrics whose base is subtracted; all others are divided by theirs."""


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
    if metric in PAIRED:
        return None if base is None else PAIRED[metric](mine, base)
    return (efficiency if metric == "efficiency" else partial(counted, metric))(mine, base)


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
    if not rows:
        return None
    table = np.array(rows, float)  # None becomes NaN
    known = ~np.isnan(table).any(axis=1)
    ids = [row.prompt_id for row, one in zip(entry.per_prompt, known, strict=True) if one]
    if not ids:
        return None
    sums = by_prompt(table[known], ids)

    def measure(sums: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = sums[..., 0] / sums[..., 1]
            if sums.shape[-1] > 2:
                other = sums[..., 2] / sums[..., 3]
                value = value - other if less else value / other
        return np.where(np.isfinite(value), value, np.nan)[..., None]

    value = float(measure(sums.sum(0)[None])[0, 0])
    if not np.isfinite(value):
        return None
    low, high = bootstrap_of_sums(
        sums, measure, resamples=resamples_for(TAIL, len(sums)), tail=TAIL
    )
    return Estimate(value, float(low[0]), float(high[0]))


def side(row: PromptRow, *, whole: bool = False) -> tuple[float, int]:
    """Seconds and tokens behind the first token, the prompt's reading by the target left out; or
    the whole request's."""
    return (row.seconds, row.tokens) if whole else (row.seconds - row.ttft_ms / 1e3, row.tokens - 1)


def pace(rows: Sequence[PromptRow]) -> float:
    """Seconds per token of decoding alone; of whole requests where none has a second token."""
    whole = all(row.tokens < 2 for row in rows)
    sides = [side(row, whole=whole) for row in rows]
    seconds, tokens = (sum(column) for column in zip(*sides, strict=True))
    return float(seconds / max(1, tokens))


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
    table = np.array([(*side(other, whole=whole), *side(one, whole=whole)) for one, other in known])
    sums = by_prompt(table, [one.prompt_id for one, _ in known])
    return Estimate(*paired_bootstrap_ratio(*sums.T, tail=TAIL))


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


def wins(mine: BenchEntry, base: BenchEntry) -> Estimate | None:
    """Share of the texts that have as many words in common with the reference as another's, or
    more."""
    pairs = zip(mine.per_prompt, base.per_prompt, strict=True)
    known = [
        (None if one.rouge_l is None or other.rouge_l is None else one.rouge_l >= other.rouge_l, 1)
        for one, other in pairs
    ]
    return of_sums(mine, known)


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
    return entry.strategy in DRAFT_FIRST or entry.parameters.get("draft_first") in ("true", "True")


def ratio_of_medians(mine: BenchEntry, base: BenchEntry) -> Estimate:
    """The median time to the first token over another one's, both over the same prompts."""
    table = np.array([[row.ttft_ms for row in entry.per_prompt] for entry in (mine, base)])
    middle = np.median(table, axis=-1)
    ends = np.median(table[:, resample(table.shape[1], FEWEST_RESAMPLES, 0)], axis=-1)
    low, high = percentile_ends(ends[0] / ends[1], TAIL)
    return Estimate(float(middle[0] / middle[1]), float(low), float(high))


PAIRED: dict[str, Callable[[BenchEntry, BenchEntry], Estimate | None]] = {
    "speed": speed,
    "request": partial(speed, whole=True),
    "ttft": ratio_of_medians,
    "wins": wins,
}
"""Metrics that compare one entry with another."""
