"""Plots as PNG files, written atomically. matplotlib draws off screen and is imported only here."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving.runtime.artifacts.acceptance_table import EDGES, MIDPOINTS, AcceptanceTable
from serving.runtime.artifacts.base import write_atomically
from serving.runtime.types import DraftwellError

INK, SECOND, FAINT = "#1f4e79", "#c55a11", "#9aa5b1"


@contextmanager
def drawing(path: Path, title: str, x: str, y: str) -> Iterator[Any]:
    """Axes to draw on; the figure is written to `path` behind the block."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DraftwellError("plots need the package matplotlib: pip install 'draftwell[pipeline]'") from error
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def speedup_bars(report: Mapping[str, Any], path: Path) -> Path:
    """Speedup over autoregressive of every strategy of a bench, with intervals."""
    entries = [(label, e) for label, e in report["strategies"].items() if e["speedup"] is not None]
    with drawing(path, f"Speedup over autoregressive, {report['pair']}", "", "times as fast") as axes:
        heights = [e["speedup"] for _, e in entries]
        ends = [[max(0.0, e["speedup"] - e["speedup_low"]) for _, e in entries],
                [max(0.0, e["speedup_high"] - e["speedup"]) for _, e in entries]]
        axes.bar(range(len(entries)), heights, color=INK, yerr=ends, capsize=4, ecolor=SECOND)
        axes.axhline(1.0, color=FAINT, linestyle="--")
        axes.set_xticks(range(len(entries)), [label for label, _ in entries], rotation=25, ha="right")
    return path


def acceptance_by_position(report: Mapping[str, Any], path: Path) -> Path:
    """Share of rounds in which draft token i was accepted, for every strategy that drafted."""
    with drawing(path, f"Acceptance by position, {report['pair']}", "position in the draft", "accepted / drafted") as axes:
        for label, entry in report["strategies"].items():
            shares = entry.get("acceptance_by_position")
            if shares:
                axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
        axes.set_ylim(0, 1)
        if axes.lines:
            axes.legend(frameon=False)
    return path


def time_split(report: Mapping[str, Any], path: Path) -> Path:
    """Where the time of every strategy goes: draft, target, prefill, rest."""
    entries = [(label, e["time_share"]) for label, e in report["strategies"].items() if e.get("time_share")]
    with drawing(path, f"Where the time goes, {report['pair']}", "", "share of wall time") as axes:
        bottom = [0.0] * len(entries)
        for part, colour in (("target", INK), ("draft", SECOND), ("prefill", "#7f9db9"), ("rest", FAINT)):
            shares = [split[part] or 0.0 for _, split in entries]
            axes.bar(range(len(entries)), shares, bottom=bottom, color=colour, label=part)
            bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
        axes.set_xticks(range(len(entries)), [label for label, _ in entries], rotation=25, ha="right")
        axes.legend(frameon=False, ncols=4)
    return path


def acceptance_plot(table: AcceptanceTable, path: Path) -> Path:
    """Share of judged tokens that were accepted in each confidence bin (SPIDE, Figure 3)."""
    bins = [b for b in range(20) if table.total[b]]
    with drawing(path, f"Acceptance by confidence, {table.provenance.pair}", "confidence C of the draft",
                 "accepted / judged") as axes:
        shares = [table.accepted[b] / table.total[b] for b in bins]
        largest = max(table.total) or 1
        sizes = [20 + 180 * table.total[b] / largest for b in bins]
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--", label="accepted as often as confident")
        axes.scatter([MIDPOINTS[b] for b in bins], shares, s=sizes, color=INK, alpha=0.8, label="bins, area by judged tokens")
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
        axes.vlines(EDGES, 0, 0.015, color=FAINT)
        axes.legend(frameon=False, loc="upper left")
    return path


def roc(curves: Mapping[str, tuple[Sequence[float], Sequence[float], float]], path: Path) -> Path:
    """ROC curves: name → (false positive rates, true positive rates, AUC)."""
    with drawing(path, "Verifier: ROC on untouched prompts", "false positive rate", "true positive rate") as axes:
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--")
        for (name, (fpr, tpr, auc)), colour in zip(curves.items(), (INK, SECOND, "#548235"), strict=False):
            axes.plot(fpr, tpr, color=colour, label=f"{name} (AUC {auc:.3f})")
        axes.legend(frameon=False, loc="lower right")
    return path


def reliability(bins: Sequence[Mapping[str, float]], path: Path) -> Path:
    """Reliability diagram: in each bin the mean score against the observed share."""
    with drawing(path, "Verifier: reliability on untouched prompts", "score", "share of acceptable tokens") as axes:
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--")
        largest = max((b["count"] for b in bins), default=1)
        axes.scatter([b["score"] for b in bins], [b["observed"] for b in bins], color=INK,
                     s=[20 + 180 * b["count"] / largest for b in bins])
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
    return path


def rejection_tail(counts: Sequence[int], path: Path) -> Path:
    """How often each rejection pattern was seen, by rank (CSD, Figure 2's long tail)."""
    ordered = sorted(counts, reverse=True)
    with drawing(path, "Rejection patterns", "rank of (draft token, correction)", "times seen") as axes:
        axes.plot(range(1, len(ordered) + 1), ordered, color=INK)
        if ordered:
            axes.set(xscale="log", yscale="log")
    return path


def verifier_plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """ROC and reliability of a report of `train_verifier`, as files in a folder."""
    curves = {"verifier": (report["roc"]["fpr"], report["roc"]["tpr"], report["auc"]),
              "score = C": (report["baseline_roc"]["fpr"], report["baseline_roc"]["tpr"], report["baseline_auc"])}
    return [roc(curves, folder / "roc.png"), reliability(report["reliability"], folder / "reliability.png")]


def bench_plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """The plots of a bench, as files in a folder."""
    return [speedup_bars(report, folder / "speedup.png"), acceptance_by_position(report, folder / "acceptance_by_position.png"),
            time_split(report, folder / "time_split.png")]
