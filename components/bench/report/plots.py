"""The plots of a bench: speedups, acceptance by position, the time split, curves over a parameter,
and the timeline."""

from __future__ import annotations

from pathlib import Path

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
TIMELINE_SECONDS = 2.0
"""How much of a timeline is drawn, from the first token on."""


def heading(what: str, report: BenchReport) -> str:
    """Title of a plot; it always names a padded target."""
    padded = report.padded_to
    return f"{what}, {report.pair}" + (f", target padded to {padded / 1e9:.2f} B" if padded else "")


def speedup_bars(report: BenchReport, path: Path) -> Path:
    """Speedup over autoregressive of every strategy and peer of a bench, with intervals."""
    entries = [(label, e) for label, e in entries_of(report) if e.speedup is not None]
    with drawing(path, heading("Speedup over autoregressive", report), "", "times as fast") as axes:
        heights = [e.speedup or 0.0 for _, e in entries]
        ends = [
            [max(0.0, (e.speedup or 0.0) - (e.speedup_low or 0.0)) for _, e in entries],
            [max(0.0, (e.speedup_high or 0.0) - (e.speedup or 0.0)) for _, e in entries],
        ]
        colours = [FAINT if ": " in label else INK for label, _ in entries]
        axes.bar(range(len(entries)), heights, color=colours, yerr=ends, capsize=4, ecolor=SECOND)
        axes.axhline(1.0, color=FAINT, linestyle="--")
        axes.set_xticks(
            range(len(entries)), [label for label, _ in entries], rotation=25, ha="right"
        )
    return path


def acceptance_by_position(report: BenchReport, path: Path) -> Path:
    """Share of rounds in which draft token i was accepted, for every strategy that drafted."""
    with drawing(
        path,
        heading("Acceptance by position", report),
        "position in the draft",
        "accepted / drafted",
    ) as axes:
        for label, entry in report.strategies.items():
            shares = entry.acceptance_by_position
            if shares:
                axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
        axes.set_ylim(0, 1)
        if axes.lines:
            axes.legend(frameon=False)
    return path


def time_split(report: BenchReport, path: Path) -> Path:
    """Where the time of every strategy goes: target, draft, both at once, prefill, rest."""
    entries = [(label, e.time_share) for label, e in report.strategies.items() if e.time_share]
    with drawing(path, heading("Where the time goes", report), "", "share of wall time") as axes:
        bottom = [0.0] * len(entries)
        for part, colour in PARTS.items():
            shares = [split.get(part) or 0.0 for _, split in entries]
            if not any(shares):
                continue
            axes.bar(range(len(entries)), shares, bottom=bottom, color=colour, label=part)
            bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
        axes.set_xticks(
            range(len(entries)), [label for label, _ in entries], rotation=25, ha="right"
        )
        if entries:
            axes.legend(frameon=False, ncols=3)
    return path


def curve(report: BenchReport, name: str, path: Path) -> Path:
    """Speedup and share of the target's argmax of one strategy over one of its parameters."""
    found = report.curves[name]
    points = found.points
    with drawing(
        path, heading(name, report), found.parameter, "speedup over autoregressive"
    ) as axes:
        values = [p.value for p in points]
        axes.plot(values, [p.speedup for p in points], marker="o", color=INK, label="speedup")
        shares = [p.target_argmax_share for p in points]
        if None not in shares:
            right = axes.twinx()
            right.set(ylabel="share of tokens that are the target's argmax", ylim=(0, 1.02))
            right.plot(values, shares, marker="s", color=SECOND, label="argmax share")
            right.axhline(0.9, color=SECOND, linestyle=":", linewidth=1)
            right.legend(frameon=False, loc="lower right")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="lower left")
    return path


def timeline(report: BenchReport, label: str, path: Path) -> Path:
    """When the forward passes of the first prompt ran, model by model, in the first seconds after
    the prompt's own."""
    forwards = report.strategies[label].timeline or ()
    roles = list(dict.fromkeys(role for role, _, _ in forwards))
    begin = min((end for role, _, end in forwards if role == "target"), default=0.0)
    with drawing(
        path, heading(f"Forward passes of {label}", report), "seconds of the request", ""
    ) as axes:
        for i, role in enumerate(roles):
            bars = [
                (start, end - start)
                for name, start, end in forwards
                if name == role and start < begin + TIMELINE_SECONDS and end > begin
            ]
            axes.broken_barh(
                bars, (i - 0.35, 0.7), color=PARTS.get(role, INK), edgecolor="white", linewidth=0.4
            )
        axes.set_yticks(range(len(roles)), roles)
        axes.set_xlim(begin, begin + TIMELINE_SECONDS)
    return path


def bench_plots(report: BenchReport, folder: Path) -> list[Path]:
    """The plots of a bench, as files in a folder."""
    made = [
        speedup_bars(report, folder / "speedup.png"),
        acceptance_by_position(report, folder / "acceptance_by_position.png"),
        time_split(report, folder / "time_split.png"),
    ]
    made += [curve(report, name, folder / f"curve_{file_name(name)}.png") for name in report.curves]
    return made + [
        timeline(report, label, folder / f"timeline_{file_name(label)}.png")
        for label, entry in report.strategies.items()
        if entry.timeline
    ]


def file_name(label: str) -> str:
    """A label as a part of a file's name.

    >>> file_name("spide@1+1(tau=0.5)")
    'spide-1-1-tau-0.5'
    """
    return "".join(c if c.isalnum() or c in "._" else "-" for c in label).strip("-")
