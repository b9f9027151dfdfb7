"""Parts of charts that several artifacts share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from draftwell.components.report.drawing import FAINT, INK, SECOND

COLOURS = (
    *(INK, SECOND, "#548235", "#7b4fa3", "#2a9d8f"),
    *("#a23b72", "#8a6d3b", "#4f81bd", "#d62728", "#6b7280"),
)
"""Of several curves, in order."""
NAME = 28
"""Characters of a bar's name."""


def scatter_on_diagonal(
    axes: Any,
    points: Sequence[tuple[float, float, int]],
    label: str | None = None,
    diagonal: str | None = None,
) -> None:
    """Observed shares over scores, beside the line on which they would be equal.

    Args:
        points: (score, observed share, rows); the area of a point grows with its rows.
        label, diagonal: of points and line in the legend.
    """
    axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--", label=diagonal)
    largest = max((rows for *_, rows in points), default=1)
    axes.scatter(
        [score for score, _, _ in points],
        [share for _, share, _ in points],
        s=[20 + 180 * rows / largest for *_, rows in points],
        color=INK,
        label=label,
    )
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02))


def ratio_bars(
    axes: Any, rows: Sequence[tuple[str, float, float | None, float | None]], colour: str = INK
) -> None:
    """Horizontal bars of ratios with their intervals, the first row on top, beside the line at 1.0
    where both are equally fast.

    Args:
        rows: (name, ratio, low, high); a row without an interval has none drawn.
    """
    places = range(len(rows))
    names = [name if len(name) <= NAME else f"{name[: NAME - 1]}…" for name, *_ in rows]
    ends = [ratio if high is None else max(ratio, high) for _, ratio, _, high in rows]
    below = [math.nan if low is None else max(0.0, ratio - low) for _, ratio, low, _ in rows]
    above = [math.nan if high is None else max(0.0, high - ratio) for _, ratio, _, high in rows]
    axes.barh(
        places,
        [ratio for _, ratio, *_ in rows],
        height=0.6,
        color=colour,
        xerr=[below, above],
        capsize=3,
        ecolor=SECOND,
    )
    axes.axvline(1.0, color=FAINT, linestyle="--", zorder=3)
    largest = max([1.0, *ends])
    for place, end, (_, ratio, *_) in zip(places, ends, rows, strict=True):
        axes.text(end + 0.02 * largest, place, f"{ratio:.2f}", va="center", fontsize="small")
    axes.locator_params(axis="x", nbins=5)
    axes.set_yticks(places, names)
    axes.set(xlim=(0, 1.12 * largest), ylim=(len(rows) - 0.4, -0.6))


def legend_beside(axes: Any) -> None:
    """A legend next to the axes, each label once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(
        list(unique.values()),
        list(unique),
        frameon=False,
        fontsize="small",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
