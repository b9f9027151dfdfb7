"""The plots of a bench: speedups, acceptance by position, the time split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwell.components.bench.report.tables import entries_of
from draftwell.components.bench.schema import BenchReport
from draftwell.components.report.drawing import FAINT, INK, SECOND, drawing

PARTS = {
    "target": INK,
    "draft": SECOND,
    "qualifier": "#548235",
    "overlap": "#7b4fa3",
    "prefill": "#7f9db9",
    "rest": FAINT,
}


def bench_plots(report: BenchReport, folder: Path) -> list[Path]:
    """The plots of a bench, as files in a folder."""
    return [
        speedup_bars(report, folder / "speedup.png"),
        acceptance_by_position(report, folder / "acceptance_by_position.png"),
        time_split(report, folder / "time_split.png"),
    ]


def heading(what: str, report: BenchReport) -> str:
    """Title of a plot; it always names a padded target."""
    padded = report.padded_to
    return f"{what}, {report.pair}" + (f", target padded to {padded / 1e9:.2f} B" if padded else "")


def name_bars(axes: Any, labels: Sequence[str]) -> None:
    """Names of bars below them."""
    axes.set_xticks(range(len(labels)), labels, rotation=25, ha="right")


def speedup_bars(report: BenchReport, path: Path) -> Path:
    """Speedup over autoregressive of every strategy and peer of a bench, with intervals."""
    bars = [
        (label, e.speedup, e.speedup_low or 0.0, e.speedup_high or 0.0)
        for label, e in entries_of(report)
        if e.speedup is not None
    ]
    with drawing(path, heading("Speedup over autoregressive", report), "", "times as fast") as axes:
        axes.bar(
            range(len(bars)),
            [speedup for _, speedup, _, _ in bars],
            color=[FAINT if ": " in label else INK for label, *_ in bars],
            yerr=[
                [max(0.0, speedup - low) for _, speedup, low, _ in bars],
                [max(0.0, high - speedup) for _, speedup, _, high in bars],
            ],
            capsize=4,
            ecolor=SECOND,
        )
        axes.axhline(1.0, color=FAINT, linestyle="--")
        name_bars(axes, [label for label, *_ in bars])
    return path


def acceptance_by_position(report: BenchReport, path: Path) -> Path:
    """Share of rounds in which draft token i was accepted, for every strategy that drafted."""
    title = heading("Acceptance by position", report)
    with drawing(path, title, "position in the draft", "accepted / drafted") as axes:
        for label, entry in report.strategies.items():
            if shares := entry.acceptance_by_position:
                axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
        axes.set_ylim(0, 1)
        if axes.lines:
            axes.legend(frameon=False)
    return path


def time_split(report: BenchReport, path: Path) -> Path:
    """Where the time of every strategy goes: target, draft, both at once, prefill, rest."""
    splits = {label: e.time_share for label, e in report.strategies.items() if e.time_share}
    with drawing(path, heading("Where the time goes", report), "", "share of wall time") as axes:
        bottom = [0.0] * len(splits)
        for part, colour in PARTS.items():
            shares = [split.get(part) or 0.0 for split in splits.values()]
            if any(shares):
                axes.bar(range(len(splits)), shares, bottom=bottom, color=colour, label=part)
                bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
        name_bars(axes, list(splits))
        if splits:
            axes.legend(frameon=False, ncols=3)
    return path
