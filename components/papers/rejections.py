"""How likely the target finds the draft's rejected tokens: CSD's Figure 2(b)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components.collect.trace_columns import column
from components.report.tables import markdown
from serving.recording.trace import TraceSet
from serving.runtime.pair import LoadedPair

MOST = 10
"""Pairs that are shown, as in the paper."""
COLUMNS = ("draft's token", "target's token", "times", "lowest ratio", "median", "highest")


class RejectedPair(NamedTuple):
    """A token of the draft, and the one that the target wrote in its place.

    Args:
        draft, target: their texts.
        ratios: ascending, p(draft's token) / p(target's token) wherever the pair occurs, both by the target at temperature 1.
    """

    draft: str
    target: str
    ratios: tuple[float, ...]


def rejected_pairs(pair: LoadedPair, trace: TraceSet, most: int = MOST) -> tuple[RejectedPair, ...]:
    """The most frequent pairs of a greedy trace's first choices that differ, frequent ones first."""
    table = trace.read(["kind", "draft_token", "target_token", "draft_raw_p", "target_p"])
    tokens = zip(*(table.column(name).to_pylist() for name in ("kind", "draft_token", "target_token")), strict=True)
    ratios = column(table, "draft_raw_p") / np.maximum(column(table, "target_p"), np.finfo(np.float32).tiny)
    found = defaultdict[tuple[int, int], list[float]](list)
    for (kind, draft, target), ratio in zip(tokens, ratios.tolist(), strict=True):
        if kind == "target" and draft != target:
            found[draft, target].append(ratio)
    frequent = sorted(found.items(), key=lambda one: -len(one[1]))[:most]
    return tuple(RejectedPair(pair.decode([draft]), pair.decode([target]), tuple(sorted(values))) for (draft, target), values in frequent)


def rejections_table(pairs: Sequence[RejectedPair]) -> str:
    """A row for each pair, as Markdown; empty without any."""
    rows = [[repr(one.draft), repr(one.target), str(len(one.ratios)),
             *(f"{value:.1e}" for value in (one.ratios[0], float(np.median(one.ratios)), one.ratios[-1]))] for one in pairs]
    return markdown(COLUMNS, rows) if rows else ""
