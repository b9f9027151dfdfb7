"""Parts of charts that several artifacts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwell.components.report.drawing import FAINT, INK


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
