"""The plots of a tuning, from its evidence alone: what is fast and faithful, and speed over
thresholds and draft lengths.

A plot that the evidence holds too little for is left out: no trial, no second value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwell.components.report.charts import COLOURS, legend_beside
from draftwell.components.report.drawing import FAINT, drawing
from draftwell.components.tune.evidence import Metrics, Row, Trial, TuningEvidence
from draftwell.serving.runtime.strategies import PLAIN, STRATEGIES

THRESHOLDS = ("tau", "threshold", "tau_target", "budget")
"""Names that strategies have for a threshold; of a strategy's several the first counts."""
LENGTHS = tuple(dict.fromkeys(cls.length_field for cls in STRATEGIES.values() if cls.length_field))
"""And for the length of a draft."""
PREFIX = "tuning_"
"""Of the files: plots of an older tuning are recognised by it."""
Place = tuple[float, float]
"""On the axes."""


def tuning_plots(evidence: TuningEvidence, folder: Path) -> list[Path]:
    """The plots that the evidence suffices for, as files `tuning_*.png` in a folder; those of an
    older tuning there are deleted."""
    for old in folder.glob(f"{PREFIX}*.png"):
        old.unlink()
    over_tau, over_gamma = (folder / f"{PREFIX}speed_over_{name}.png" for name in ("tau", "gamma"))
    made = [
        pareto_plot(evidence, folder / f"{PREFIX}pareto.png"),
        speed_over(evidence, THRESHOLDS, "threshold (τ)", over_tau),
        speed_over(evidence, LENGTHS, "draft length (γ), or its limit", over_gamma),
    ]
    return [path for path in made if path is not None]


def pareto_plot(evidence: TuningEvidence, path: Path) -> Path | None:
    """Seconds per token over divergence from the target, larger marks for more target calls; the
    front of the trials is a line.

    Where nothing diverges (lossless strategies only), that axis would be a single value: target
    calls take its place.
    """
    rows: list[Trial | Metrics] = [*evidence.trials, *evidence.measured]
    lossy = any(row.divergence for row in rows)
    marks = []
    for row in rows:
        x = row.divergence if lossy else row.target_calls_per_token
        if x is not None:
            marks.append(Mark(row, (x, row.seconds * 1e3)))
    if not marks:
        return None
    x_label = "divergence from the target" if lossy else "target calls per token (none diverges)"
    largest = max(mark.row.target_calls_per_token for mark in marks) or 1.0
    with drawing(
        path, "What is fast, cheap and faithful at once", x_label, "milliseconds per token"
    ) as axes:
        colours = colours_of(label_of(mark.row) for mark in marks)
        for curve in dict.fromkeys((label_of(mark.row), mark.row.was_measured) for mark in marks):
            label, measured = curve
            own = [one for one in marks if (label_of(one.row), one.row.was_measured) == curve]
            axes.scatter(
                *zip(*(mark.place for mark in own), strict=True),
                marker="D" if measured else "o",
                facecolors=colours[label] if measured else "none",
                edgecolors=colours[label],
                s=[20 + 100 * mark.row.target_calls_per_token / largest for mark in own],
                label=f"{label}, measured" if measured else label,
            )
        front = lower_left(mark.place for mark in marks if isinstance(mark.row, Trial))
        if front:
            x_values, y_values = zip(*front, strict=True)
            axes.step(x_values, y_values, where="post", color=FAINT, zorder=0, label="front")
        ring(axes, [one.place for one in marks if is_choice(one.row, evidence)])
        legend_beside(axes)
    return path


class Mark(NamedTuple):
    """A configuration on the axes."""

    row: Trial | Metrics
    place: Place


def is_choice(row: Trial | Metrics, evidence: TuningEvidence) -> bool:
    """Whether this is the measurement of what was chosen."""
    return isinstance(row, Metrics) and row.choice == evidence.choice


def speed_over(
    evidence: TuningEvidence, names: Sequence[str], x_label: str, path: Path
) -> Path | None:
    """Tokens per second of every strategy over one of its parameters.

    Lines are predicted (dotted ones tried on a few prompts, where nothing can predict): of several
    trials with one value, differing in other parameters, the fastest. Marks are measured, with the
    interval of their speedup over autoregressive decoding, which is a horizontal line. The choice
    is ringed.
    """
    curves = {
        key: marks
        for key, marks in curves_of([*evidence.trials, *evidence.measured], names).items()
        if len({mark.place[0] for mark in marks}) > 1
    }
    if not curves:
        return None
    plain = next((figure for figure in evidence.measured if figure.choice == PLAIN), None)
    with drawing(path, "Speed over " + x_label, x_label, "tokens per second") as axes:
        for key, colour in colours_of(curves).items():
            draw_predicted(axes, key, curves[key], colour)
            draw_measured(axes, key, curves[key], plain, colour)
            ring(axes, [one.place for one in curves[key] if is_choice(one.row, evidence)])
        if plain:
            axes.axhline(1 / plain.seconds, color=FAINT, linestyle="--", label=f"{PLAIN}, measured")
        axes.set_ylim(bottom=0)
        legend_beside(axes)
    return path


def draw_predicted(axes: Any, key: str, marks: Sequence[Mark], colour: str) -> None:
    """The line of the fastest trial of each value."""
    trials = [mark for mark in marks if isinstance(mark.row, Trial)]
    if not trials:
        return
    # of equal values the last counts, the fastest
    best = dict(sorted(mark.place for mark in trials))
    brief = trials[0].row.was_measured
    axes.plot(
        list(best),
        list(best.values()),
        color=colour,
        marker=".",
        linestyle=":" if brief else "-",
        label=f"{key}, {'tried briefly' if brief else 'predicted'}",
    )


def draw_measured(
    axes: Any, key: str, marks: Sequence[Mark], plain: Metrics | None, colour: str
) -> None:
    """Marks with the interval of the speedup, where plain decoding was measured."""
    own = [(mark.place, mark.row) for mark in marks if isinstance(mark.row, Metrics)]
    if not own:
        return
    bars = None
    if plain is not None:
        base = 1 / plain.seconds
        below = [max(0.0, speed - row.speedup_low * base) for (_, speed), row in own]
        above = [max(0.0, row.speedup_high * base - speed) for (_, speed), row in own]
        bars = [below, above]
    values, speeds = zip(*(place for place, _ in own), strict=True)
    axes.errorbar(
        values, speeds, yerr=bars, fmt="D", color=colour, capsize=4, label=f"{key}, measured"
    )


def is_number(value: Any) -> bool:
    """Whether a value has a place on an axis: no text, no flag, nothing infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def label_of(row: Row) -> str:
    """The name of a strategy's curve: draft and target in turn or at once are two.

    >>> (
    ...     label_of(Row(strategy="spide", parameters={"parallel": True})),
    ...     label_of(Row(strategy="svip", parameters={})),
    ... )
    ('spide parallel', 'svip')
    """
    return f"{row.strategy} parallel" if row.parameters.get("parallel") is True else row.strategy


def curves_of(rows: Iterable[Trial | Metrics], names: Sequence[str]) -> dict[str, list[Mark]]:
    """Curve → its marks, speed over value, where the strategy has one of these parameters as a
    number."""
    found: dict[str, list[Mark]] = {}
    for row in rows:
        name = next((name for name in names if name in row.parameters), None)
        if name is not None and is_number(row.parameters[name]):
            key = f"{label_of(row)} ({name})"
            found.setdefault(key, []).append(
                Mark(row, (float(row.parameters[name]), 1 / row.seconds))
            )
    return found


def lower_left(points: Iterable[Place]) -> list[Place]:
    """The points that no other beats in both coordinates, by the first.

    >>> lower_left([(1, 5), (2, 6), (3, 2), (3, 4)])
    [(1, 5), (3, 2)]
    """
    line: list[Place] = []
    for x, y in sorted(points):
        if not line or y < line[-1][1]:
            line.append((x, y))
    return line


def colours_of(labels: Iterable[str]) -> dict[str, str]:
    """A colour for each label, in order."""
    return {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(dict.fromkeys(labels))}


def ring(axes: Any, points: Sequence[Place]) -> None:
    """A ring around what was chosen."""
    if points:
        style = {"facecolors": "none", "edgecolors": "#d62728", "linewidths": 1.8}
        axes.scatter(*zip(*points, strict=True), s=260, label="chosen", zorder=5, **style)
