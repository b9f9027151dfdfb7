"""Pictures of the page: each table's values, the paper's next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from components.papers.page import Result
from components.papers.tables import PaperTable
from components.report.drawing import FAINT, INK, SECOND, drawing


def draw_table(table: PaperTable, results: Sequence[Result], path: Path) -> Path | None:
    """Bars of the paper's values and ours with intervals; None where nothing was measured."""
    known = [(result.what, result.paper, result.ours) for result in results
             if result.ours is not None and result.paper is not None and "speed" in result.what]
    if not known:
        return None
    with drawing(path, table.title, "", "times as fast") as axes:
        places = range(len(known))
        axes.bar([i - 0.2 for i in places], [paper for _, paper, _ in known], width=0.38, color=FAINT, label="paper")
        axes.bar([i + 0.2 for i in places], [ours.value for _, _, ours in known], width=0.38, color=INK, label="here", capsize=3,
                 ecolor=SECOND, yerr=[[max(0.0, ours.value - ours.low) for _, _, ours in known],
                                      [max(0.0, ours.high - ours.value) for _, _, ours in known]])
        axes.axhline(1.0, color=FAINT, linestyle="--")
        axes.set_xticks(places, [what for what, _, _ in known], rotation=30, ha="right", fontsize=7)
        axes.legend(frameon=False)
    return path
