"""A drift report for people: a table for the terminal, Markdown, and plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.drift.schema import DriftReport
from draftwell.components.report.drawing import FAINT, INK, SECOND, drawing
from draftwell.components.report.tables import markdown, number, rich_table
from draftwell.serving.artifacts.acceptance_table import EDGES, MIDPOINTS

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("check", "value", "limit", "by chance", "p", "needed", "drift?", "detail")
BIN_COLUMNS = ("confidence", "table", "when calibrated", "now", "95 % interval", "positions")
NAMES = {
    "confidence_psi": "confidence",
    "acceptance": "acceptance rate",
    "table": "acceptance by confidence",
    "verifier": "verifier calibration",
    "novelty": "new rejection patterns",
    "first_tokens": "first tokens of drafts",
}


def rows_of(report: DriftReport) -> list[tuple[str, ...]]:
    """A row for each check, as words."""
    return [
        (
            NAMES[c.name],
            f"{c.value:.3f}",
            f"{c.limit:g}",
            f"{c.chance:.3f}",
            f"{c.p_value:.4f}",
            f"{c.p_needed:.4f}",
            "yes" if c.drifted else "no",
            c.words,
        )
        for c in report.checks
    ]


def headline(report: DriftReport) -> str:
    """Verdict and why, in a line."""
    return f"{report.pair}: {report.verdict}: {report.why}"


def sides(report: DriftReport) -> str:
    """What was compared, in a line."""
    parts = [
        f"{name} {side.prompts} {side.unit}, {side.positions} positions, acceptance "
        f"{number(side.acceptance, '.1%')}"
        for name, side in (("calibrated on", report.reference), ("now", report.feedback))
    ]
    return f"{report.baseline}; {'; '.join(parts)}; texts by {', '.join(report.kinds)}"


def drift_table(report: DriftReport) -> Table:
    """The checks for a terminal; the verdict is the title."""
    return rich_table(
        COLUMNS, rows_of(report), "\n".join([sides(report), *report.notes]), title=headline(report)
    )


def drift_markdown(report: DriftReport) -> str:
    """The whole report but the histograms, which are in the plots."""
    bins = [
        (
            f"{b.low:.3g} … {b.high:.3g}",
            *(number(x, ".2f") for x in (b.table, b.then, b.now)),
            f"{number(b.now_low, '.2f')} … {number(b.now_high, '.2f')}",
            str(b.positions),
        )
        for b in report.bins
        if b.positions
    ]
    parts = [
        f"# Drift of {report.pair}: {report.verdict}\n",
        "".join(f"- {reason}\n" for reason in report.reasons),
        sides(report) + "\n",
    ]
    if report.checks:
        parts += ["## Checks\n", markdown(COLUMNS, rows_of(report))]
    if bins:
        parts += ["## Acceptance by confidence\n", markdown(BIN_COLUMNS, bins)]
    if (novelty := report.novelty) is not None and novelty.memory is not None:
        parts.append(
            f"{novelty.memory:.0%} of rejections are not in the champion's correction memory.\n"
        )
    parts += ["".join(f"- {note}\n" for note in report.notes)] if report.notes else []
    parts.append(
        f"Report {report.digest[:12]}, feedback {report.feedback.digest[:12]}, reference "
        f"{report.reference.digest[:12]}.\n"
    )
    return "\n".join(parts)


def drift_json(report: DriftReport) -> dict[str, Any]:
    """The report as plain JSON, with its digest."""
    return {**report.model_dump(mode="json"), "digest": report.digest}


def drift_plots(report: DriftReport, folder: Path) -> list[Path]:
    """Confidence then and now, and acceptance by confidence with intervals, as PNG files; none
    without positions."""
    if not report.bins:
        return []
    histogram, acceptance = folder / "drift_confidence.png", folder / "drift_acceptance.png"
    draw_confidence(report, histogram)
    draw_acceptance(report, acceptance)
    return [histogram, acceptance]


def draw_confidence(report: DriftReport, path: Path) -> None:
    """Histograms of the draft's confidence, then and now."""
    labels = [f"{low:.2g}" for low in (0.0, *EDGES)]
    places = range(len(labels))
    title = f"Confidence of the draft, {report.pair}"
    with drawing(path, title, "lower edge of the bin of C", "share of positions") as axes:
        for name, colour, shift, shares in (
            ("when calibrated", FAINT, -0.2, report.confidence_then),
            ("now", INK, 0.2, report.confidence_now),
        ):
            axes.bar([i + shift for i in places], shares, 0.4, color=colour, label=name)
        axes.set_xticks(list(places), labels, rotation=60, fontsize=7)
        axes.legend(frameon=False)


def draw_acceptance(report: DriftReport, path: Path) -> None:
    """Acceptance in every bin of confidence: the table's, the reference's, and now with its
    interval."""
    title = f"Acceptance by confidence, {report.pair}"
    with drawing(path, title, "confidence C of the draft", "accepted / judged") as axes:
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--")
        for name, colour, marker, values in (
            ("the champion's table", FAINT, "s", [b.table for b in report.bins]),
            ("when calibrated", SECOND, "^", [b.then for b in report.bins]),
        ):
            shown = [(x, y) for x, y in zip(MIDPOINTS, values, strict=True) if y is not None]
            where = tuple(zip(*shown, strict=True)) or ((), ())
            axes.scatter(*where, color=colour, marker=marker, s=24, label=name)
        seen = [
            (x, b.now, b.now - b.now_low, b.now_high - b.now)
            for x, b in zip(MIDPOINTS, report.bins, strict=True)
            if b.now is not None and b.now_low is not None and b.now_high is not None
        ]
        middles, rates, below, above = zip(*seen, strict=True) if seen else ((), (), (), ())
        axes.errorbar(
            middles,
            rates,
            yerr=[[max(0.0, gap) for gap in gaps] for gaps in (below, above)],
            fmt="o",
            color=INK,
            markersize=4,
            capsize=2,
            label="now, 95 % interval",
        )
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
        axes.legend(frameon=False, loc="upper left")
