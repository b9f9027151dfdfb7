"""The plots of a tuning, from its evidence alone: the Pareto front, speed over thresholds and draft
lengths, predicted against measured.

A plot that the evidence holds too little for is left out: no trial, no second value, no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from draftwell.components.report.drawing import FAINT, INK, SECOND, drawing
from draftwell.components.tune.evidence import Metrics, Row, Trial, TuningEvidence, usable
from draftwell.serving.runtime.strategies import PLAIN

COLOURS = (
    INK,
    SECOND,
    "#548235",
    "#7b4fa3",
    "#2a9d8f",
    "#a23b72",
    "#8a6d3b",
    "#4f81bd",
    "#d62728",
    "#6b7280",
)
THRESHOLDS = ("tau", "threshold", "tau_target", "budget")
LENGTHS = ("num_speculative_tokens", "prompt_lookup_num_tokens", "max_draft", "max_sequences")
"""Names that strategies have for a threshold and for the length of a draft; of a strategy's several
the first counts."""
PREFIX = "tuning_"
"""Of the files: plots of an older tuning are recognised by it."""
R = TypeVar("R", bound=Row)


def tuning_plots(evidence: TuningEvidence, folder: Path) -> list[Path]:
    """The plots that the evidence suffices for, as files `tuning_*.png` in a folder; those of an
    older tuning there are deleted."""
    for old in folder.glob(f"{PREFIX}*.png"):
        old.unlink()
    made = [
        pareto_plot(evidence, folder / f"{PREFIX}pareto.png"),
        speed_over(evidence, THRESHOLDS, "threshold (τ)", folder / f"{PREFIX}speed_over_tau.png"),
        speed_over(
            evidence,
            LENGTHS,
            "draft length (γ), or its limit",
            folder / f"{PREFIX}speed_over_gamma.png",
        ),
        predicted_against_measured(evidence, folder / f"{PREFIX}predicted.png"),
    ]
    return [path for path in made if path is not None]


def pareto_plot(evidence: TuningEvidence, path: Path) -> Path | None:
    """Seconds per token over divergence from the target, larger marks for more target calls; the
    front of the trials is a line.

    Where nothing diverges (lossless strategies only), that axis would be a single value: target
    calls take its place.
    """
    points = candidates(evidence)
    lossy = any(point.divergence for point in points)
    places = [
        (point, x)
        for point in points
        if (x := point.divergence if lossy else point.calls) is not None
    ]
    if not places:
        return None
    x_label = (
        "divergence from the target" if lossy else "target calls per token (nothing here diverges)"
    )
    largest = max((point.calls or 0.0 for point, _ in places), default=0.0) or 1.0
    with drawing(
        path, "What is fast, cheap and faithful at once", x_label, "milliseconds per token"
    ) as axes:
        colours = colours_of(point.label for point, _ in places)
        for label, colour in colours.items():
            for measured, marker, face in ((False, "o", "none"), (True, "D", colour)):
                mine = [
                    (point, x)
                    for point, x in places
                    if (point.label, point.measured) == (label, measured)
                ]
                if mine:
                    axes.scatter(
                        [x for _, x in mine],
                        [p.seconds * 1e3 for p, _ in mine],
                        marker=marker,
                        facecolors=face,
                        edgecolors=colour,
                        s=[20 + 100 * (p.calls or 0.0) / largest for p, _ in mine],
                        label=f"{label}, measured" if measured else label,
                    )
        line = lower_left([(x, point.seconds * 1e3) for point, x in places if point.tried])
        axes.plot(
            [x for x, _ in line],
            [y for _, y in line],
            color=FAINT,
            drawstyle="steps-post",
            zorder=0,
            label="front",
        )
        ring(
            axes,
            [
                (x, point.seconds * 1e3)
                for point, x in places
                if not point.tried and point.row.choice == evidence.choice
            ],
        )
        legend(axes)
    return path


def speed_over(
    evidence: TuningEvidence, names: Sequence[str], x_label: str, path: Path
) -> Path | None:
    """Tokens per second of every strategy over one of its parameters.

    Lines are predicted (dotted ones tried on a few prompts, where nothing can predict): of several
    trials with one value, differing in other parameters, the fastest. Marks are measured, with the
    interval of their speedup over autoregressive decoding, which is a horizontal line. The choice
    is ringed.
    """
    trials, found = grouped(evidence.timed_trials, names), grouped(evidence.latest_metrics(), names)
    several = [
        key
        for key in dict.fromkeys([*trials, *found])
        if len({value for value, _ in (*trials.get(key, ()), *found.get(key, ()))}) > 1
    ]
    if not several:
        return None
    base = next(
        (
            figure.seconds_per_token
            for figure in evidence.latest_metrics()
            if figure.choice == PLAIN
        ),
        None,
    )
    with drawing(path, "Speed over " + x_label, x_label, "tokens per second") as axes:
        for key, colour in colours_of(several).items():
            best: dict[float, float] = {}
            for value, trial in trials.get(key, ()):
                best[value] = max(best.get(value, 0.0), 1 / trial.predicted_seconds_per_token)
            if best:
                brief = trials[key][0][1].source == "measured"
                axes.plot(
                    sorted(best),
                    [best[value] for value in sorted(best)],
                    color=colour,
                    marker=".",
                    linestyle=":" if brief else "-",
                    label=f"{key}, {'tried briefly' if brief else 'predicted'}",
                )
            marks = found.get(key, [])
            if marks:
                speeds = [1 / figure.seconds_per_token for _, figure in marks]
                axes.errorbar(
                    [value for value, _ in marks],
                    speeds,
                    yerr=ends(marks, speeds, base),
                    fmt="D",
                    color=colour,
                    capsize=4,
                    label=f"{key}, measured",
                )
            ring(
                axes,
                [
                    (value, 1 / figure.seconds_per_token)
                    for value, figure in marks
                    if figure.choice == evidence.choice
                ],
            )
        if base:
            axes.axhline(1 / base, color=FAINT, linestyle="--", label=f"{PLAIN}, measured")
        axes.set_ylim(bottom=0)
        legend(axes)
    return path


def predicted_against_measured(evidence: TuningEvidence, path: Path) -> Path | None:
    """Milliseconds per token that replay predicted, against those measured, with a band of 10 %."""
    figures = [
        figure for figure in evidence.latest_metrics() if usable(figure.predicted_seconds_per_token)
    ]
    if not figures:
        return None
    pairs = [
        (figure.seconds_per_token * 1e3, (figure.predicted_seconds_per_token or 0.0) * 1e3)
        for figure in figures
    ]
    error = median(figure.prediction_error or 0.0 for figure in figures)
    far = 1.1 * max(max(pair) for pair in pairs)
    title = f"Predicted against measured, median error {error:.0%}"
    with drawing(path, title, "measured milliseconds per token", "predicted") as axes:
        axes.plot([0, far], [0, far], color=FAINT, linestyle="--")
        axes.fill_between(
            [0, far],
            [0, 0.9 * far],
            [0, 1.1 * far],
            color=FAINT,
            alpha=0.25,
            linewidth=0,
            label="within 10 %",
        )
        for label, colour in colours_of(label_of(figure) for figure in figures).items():
            mine = [
                pair
                for pair, figure in zip(pairs, figures, strict=True)
                if label_of(figure) == label
            ]
            axes.scatter([x for x, _ in mine], [y for _, y in mine], color=colour, label=label)
        ring(
            axes,
            [
                pair
                for pair, figure in zip(pairs, figures, strict=True)
                if figure.choice == evidence.choice
            ],
        )
        axes.set(xlim=(0, far), ylim=(0, far))
        legend(axes)
    return path


@dataclass(frozen=True)
class Point:
    """A configuration with its objectives; one that is not known is None.

    Args:
        tried: it is a trial of the search, not a measurement of the shortlist.
        measured: its values are measured, not predicted.
    """

    row: Row
    seconds: float
    calls: float | None
    divergence: float | None
    tried: bool
    measured: bool

    @property
    def label(self) -> str:
        """Its curve's name."""
        return label_of(self.row)


def candidates(evidence: TuningEvidence) -> list[Point]:
    """All configurations with a time: what was tried, and what was measured at length."""
    tried = [
        point_of(trial, trial.predicted_seconds_per_token, True, trial.source == "measured")
        for trial in evidence.timed_trials
    ]
    return tried + [
        point_of(figure, figure.seconds_per_token, False, True)
        for figure in evidence.latest_metrics()
    ]


def point_of(row: Trial | Metrics, seconds: float, tried: bool, measured: bool) -> Point:
    """One configuration."""
    calls, divergence = row.target_calls_per_token, row.divergence
    return Point(
        row,
        seconds,
        calls if is_number(calls) else None,
        divergence if is_number(divergence) else None,
        tried,
        measured,
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


def grouped(rows: Iterable[R], names: Sequence[str]) -> dict[str, list[tuple[float, R]]]:
    """Curve → its (value, row), where the strategy has one of these parameters as a number."""
    found: dict[str, list[tuple[float, R]]] = {}
    for row in rows:
        name = next((name for name in names if name in row.parameters), None)
        if name is not None and is_number(row.parameters[name]):
            found.setdefault(f"{label_of(row)} ({name})", []).append(
                (float(row.parameters[name]), row)
            )
    return found


def ends(
    marks: Sequence[tuple[float, Metrics]], speeds: Sequence[float], base: float | None
) -> list[list[float]] | None:
    """Lengths of the bars below and above every measured speed; None where plain decoding was not
    measured."""
    intervals = [(figure.speedup_low, figure.speedup_high) for _, figure in marks]
    if base is None or any(None in interval for interval in intervals):
        return None
    return [
        [
            max(0.0, speed - (low or 0.0) / base)
            for speed, (low, _) in zip(speeds, intervals, strict=True)
        ],
        [
            max(0.0, (high or 0.0) / base - speed)
            for speed, (_, high) in zip(speeds, intervals, strict=True)
        ],
    ]


def lower_left(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, by the first.

    >>> lower_left([(1, 5), (2, 6), (3, 2), (3, 4)])
    [(1, 5), (3, 2)]
    """
    line: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not line or y < line[-1][1]:
            line.append((x, y))
    return line


def colours_of(labels: Iterable[str]) -> dict[str, str]:
    """A colour for each label, in order."""
    return {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(dict.fromkeys(labels))}


def ring(axes: Any, points: Sequence[tuple[float, float]]) -> None:
    """A ring around what was chosen."""
    if points:
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            s=260,
            facecolors="none",
            edgecolors="#d62728",
            linewidths=1.8,
            label="chosen",
            zorder=5,
        )


def legend(axes: Any) -> None:
    """A legend next to the axes, each label once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(
        list(unique.values()),
        list(unique),
        frameon=False,
        fontsize="small",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
