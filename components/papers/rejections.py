"""How likely the target finds the draft's rejected tokens: CSD's Figure 2(b)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftwell.components.collect.trace_columns import column
from draftwell.components.report.tables import markdown
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair

MOST = 10
"""Pairs that are shown, as in the paper."""
PAPERS_DECADES = 10
"""The paper's ratios of one pair are from near 1 to below 1e-10."""
COLUMNS = ("draft's token", "target's token", "times", "lowest ratio", "median", "highest")


class RejectedPair(NamedTuple):
    """A token of the draft, and the one that the target wrote in its place.

    Args:
        draft, target: their texts.
        exponents: ascending, log10 of p(draft's token) / p(target's token) wherever the pair
            occurs, both by the target at temperature 1.
    """

    draft: str
    target: str
    exponents: tuple[float, ...]

    @property
    def decades(self) -> float:
        """Powers of ten between the lowest ratio and the highest."""
        return self.exponents[-1] - self.exponents[0]


def rejected_pairs(pair: LoadedPair, trace: TraceSet, most: int = MOST) -> tuple[RejectedPair, ...]:
    """The most frequent pairs of a greedy trace's first choices that differ, frequent ones
    first."""
    table = trace.read(["kind", "draft_token", "target_token", "draft_raw_p", "target_p"])
    tokens = zip(
        *(table.column(name).to_pylist() for name in ("kind", "draft_token", "target_token")),
        strict=True,
    )
    least = np.finfo(np.float32).tiny  # a probability that was rounded to 0
    p_draft, p_target = (
        np.log10(np.maximum(column(table, name), least)) for name in ("draft_raw_p", "target_p")
    )
    found = defaultdict[tuple[int, int], list[float]](list)
    for (kind, draft, target), exponent in zip(tokens, (p_draft - p_target).tolist(), strict=True):
        if kind == "target" and draft != target:
            found[draft, target].append(exponent)
    frequent = sorted(found.items(), key=lambda one: -len(one[1]))[:most]
    return tuple(
        RejectedPair(text_of(pair, draft), text_of(pair, target), tuple(sorted(values)))
        for (draft, target), values in frequent
    )


def text_of(pair: LoadedPair, token: int) -> str:
    """A token's text, or its number where it has none, such as an end of text."""
    return pair.decode([token]) or f"token {token}"


def rejections_table(pairs: Sequence[RejectedPair]) -> str:
    """A row for each pair, as Markdown; empty without any."""
    rows = [
        [
            repr(one.draft),
            repr(one.target),
            str(len(one.exponents)),
            *(
                f"{10**value:.1e}"
                for value in (one.exponents[0], float(np.median(one.exponents)), one.exponents[-1])
            ),
        ]
        for one in pairs
    ]
    return markdown(COLUMNS, rows) if rows else ""


def decades_words(pairs: Sequence[RejectedPair]) -> str:
    """How far one pair's ratios are from each other, in a sentence; empty without any.

    >>> decades_words([RejectedPair("a", "the", (-4.0, -1.0)), RejectedPair("a", "an", (-1.5, -0.5))])
    'Between the lowest and the highest ratio of a pair are 1.0 to 3.0 powers of ten (median 2.0); in the paper, of 28,000 samples, more \
than 10. Such a span grows with how often a pair occurs.'
    """  # noqa: E501
    if not pairs:
        return ""
    decades = [one.decades for one in pairs]
    return (
        f"Between the lowest and the highest ratio of a pair are {min(decades):.1f} to "
        f"{max(decades):.1f} powers of ten (median "
        f"{float(np.median(decades)):.1f}); in the paper, of 28,000 samples, more than "
        f"{PAPERS_DECADES}. Such a span grows with how "
        "often a pair occurs."
    )
