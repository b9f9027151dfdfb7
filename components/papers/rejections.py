"""How likely the target finds the draft's rejected tokens: CSD's Figure 2(b)."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from draftwell.components.collect.trace_columns import column
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair

MOST = 10
"""Pairs that are kept, as many as the paper shows."""


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
