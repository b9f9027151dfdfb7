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
    "confidence_psi": "confidence (PSI)",
    "confidence_ks": "confidence (KS)",
    "acceptance": "acceptance rate",
    "table": "acceptance by confidence",
    "verifier": "verifier calibration",
    "novelty": "new rejection patterns",
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
    return f"{report.pair}: {report.verdict}: " + "; ".join(report.reasons)


def sides(report: DriftReport) -> str:
    """What was compared, in a line."""
    parts = []
    for name, side in (("calibrated on", report.reference), ("now", report.feedback)):
        parts.append(
            f"{name} {side.prompts} prompts, {side.positions} positions, acceptance "
            f"{number(side.acceptance, '.1%')}"
        )
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
    edges = (0.0, *EDGES, 1.0)
    labels = [f"{low:.2g}" for low in edges[:-1]]
    with drawing(
        histogram,
        f"Confidence of the draft, {report.pair}",
        "lower edge of the bin of C",
        "share of positions",
    ) as axes:
        places = range(len(labels))
        axes.bar(
            [i - 0.2 for i in places],
            report.confidence_then,
            0.4,
            color=FAINT,
            label="when calibrated",
        )
        axes.bar([i + 0.2 for i in places], report.confidence_now, 0.4, color=INK, label="now")
        axes.set_xticks(list(places), labels, rotation=60, fontsize=7)
        axes.legend(frameon=False)
    seen = [
        (i, b)
        for i, b in enumerate(report.bins)
        if b.now is not None and b.now_low is not None and b.now_high is not None
    ]
    with drawing(
        acceptance,
        f"Acceptance by confidence, {report.pair}",
        "confidence C of the draft",
        "accepted / judged",
    ) as axes:
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--")
        for name, colour, marker, chosen in (
            ("the champion's table", FAINT, "s", [(i, b.table) for i, b in enumerate(report.bins)]),
            ("when calibrated", SECOND, "^", [(i, b.then) for i, b in enumerate(report.bins)]),
        ):
            shown = [(MIDPOINTS[i], value) for i, value in chosen if value is not None]
            axes.scatter(
                [x for x, _ in shown],
                [y for _, y in shown],
                color=colour,
                marker=marker,
                s=24,
                label=name,
            )
        middles = [MIDPOINTS[i] for i, _ in seen]
        rates = [b.now or 0.0 for _, b in seen]
        spans = [
            [max(0.0, rate - (b.now_low or 0.0)) for rate, (_, b) in zip(rates, seen, strict=True)],
            [
                max(0.0, (b.now_high or 0.0) - rate)
                for rate, (_, b) in zip(rates, seen, strict=True)
            ],
        ]
        axes.errorbar(
            middles,
            rates,
            yerr=spans,
            fmt="o",
            color=INK,
            markersize=4,
            capsize=2,
            label="now, 95 % interval",
        )
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
        axes.legend(frameon=False, loc="upper left")
    return [histogram, acceptance]
