"""Plots of the calibrated artifacts, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftwell.components.report.charts import scatter_on_diagonal
from draftwell.components.report.drawing import FAINT, INK, drawing
from draftwell.serving.artifacts.acceptance_table import EDGES, MIDPOINTS, AcceptanceTable


def acceptance_plot(table: AcceptanceTable, path: Path) -> Path:
    """Share of judged tokens that were accepted in each confidence bin (SPIDE, Figure 3)."""
    bins = [b for b in range(len(EDGES) + 1) if table.total[b]]
    with drawing(
        path,
        f"Acceptance by confidence, {table.provenance.pair}",
        "confidence C of the draft",
        "accepted / judged",
    ) as axes:
        scatter_on_diagonal(
            axes,
            [(MIDPOINTS[b], table.accepted[b] / table.total[b], table.total[b]) for b in bins],
            "bins, area by judged tokens",
            "accepted as often as confident",
        )
        axes.vlines(EDGES, 0, 0.015, color=FAINT)
        axes.legend(frameon=False, loc="upper left")
    return path


def rejection_tail(counts: Sequence[int], path: Path) -> Path:
    """How often each rejection pattern was seen, by rank (CSD, Figure 2's long tail)."""
    ordered = sorted(counts, reverse=True)
    with drawing(
        path, "Rejection patterns", "rank of (draft token, correction)", "times seen"
    ) as axes:
        axes.plot(range(1, len(ordered) + 1), ordered, color=INK)
        if ordered:
            axes.set(xscale="log", yscale="log")
    return path
