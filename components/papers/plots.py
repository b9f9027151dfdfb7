"""Pictures of the pages: values with intervals beside the paper's, and what lossy methods gain and
lose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftwell.components.papers.estimates import Estimate
from draftwell.components.papers.results import Result
from draftwell.components.report.drawing import FAINT, INK, SECOND, drawing


def draw_rows(title: str, rows: Sequence[Result], path: Path) -> Path | None:
    """The paper's values and ours of a table's claims; None where nothing was measured. What gets
    no verdict is faint."""
    known = [
        (one, one.ours, one.placed.paper)
        for one in rows
        if one.ours is not None and one.placed.paper is not None and one.placed.row.claim
    ]
    if not known:
        return None
    with drawing(path, title, "times as fast", "") as axes:
        for i, (one, ours, paper) in enumerate(known):
            unlike = one.verdict == "not comparable"
            axes.errorbar(
                ours.value,
                i,
                xerr=ends(ours),
                fmt="o",
                color=FAINT if unlike else INK,
                capsize=2,
                label="here" if i == 0 else None,
            )
            axes.plot(paper, i, "x", color=SECOND, label="paper" if i == 0 else None)
        axes.axvline(1.0, color=FAINT, linestyle="--")
        axes.set_yticks(
            range(len(known)),
            [f"{one.placed.label}: {one.placed.row.what}" for one, _, _ in known],
            fontsize=6,
        )
        axes.invert_yaxis()
        axes.legend(frameon=False, fontsize=7)
    return path


def draw_losses(title: str, rows: Sequence[Result], path: Path) -> Path | None:
    """What each lossy contender gains over SD against what it loses; None without any."""
    known = [
        (one, one.ours, one.lost)
        for one in rows
        if one.ours is not None
        and one.lost is not None
        and one.placed.row.metric == "speed"
        and one.placed.row.over.startswith("SD")
    ]
    if not known:
        return None
    with drawing(
        path, title, "speed over SD", "first choices of the target, less lossless"
    ) as axes:
        for i, (one, gained, lost) in enumerate(known):
            axes.errorbar(
                gained.value,
                lost.value,
                xerr=ends(gained),
                yerr=ends(lost),
                fmt="o",
                color=INK,
                ecolor=FAINT,
                capsize=2,
            )
            axes.annotate(
                f"{one.placed.label}: {one.placed.row.role}",
                (gained.value, lost.value),
                xytext=(5, 8 * (i % 5 - 2)),
                textcoords="offset points",
                fontsize=6,
            )
        axes.axhline(0.0, color=FAINT, linestyle="--")
        axes.axvline(1.0, color=FAINT, linestyle="--")
        axes.set_xscale("log")
    return path


def ends(estimate: Estimate) -> list[list[float]]:
    """An interval as Matplotlib takes it: what lies below the value and above it."""
    return [[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]]
