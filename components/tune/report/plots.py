"""The plots of a tuning, from its evidence alone: what is fast and faithful, and speed over
thresholds and draft lengths.

A plot that the evidence holds too little for is left out: no trial, no second value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from draftwell.components.report.drawing import FAINT, INK, SECOND, drawing
from draftwell.components.tune.evidence import Metrics, Row, Trial, TuningEvidence
from draftwell.serving.runtime.strategies import PLAIN

COLOURS = (
    *(INK, SECOND, "#548235", "#7b4fa3", "#2a9d8f"),
    *("#a23b72", "#8a6d3b", "#4f81bd", "#d62728", "#6b7280"),
)
THRESHOLDS = ("tau", "threshold", "tau_target", "budget")
LENGTHS = ("num_speculative_tokens", "prompt_lookup_num_tokens", "max_draft", "max_sequences")
"""Names that strategies have for a threshold and for the length of a draft; of a strategy's several
the first counts."""
PREFIX = "tuning_"
"""Of the files: plots of an older tuning are recognised by it."""
R = TypeVar("R", bound=Row)
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


class Point(NamedTuple):
    """A configuration; `tried`: a trial of the search, not a measurement of the shortlist."""

    row: Trial | Metrics
    seconds: float
    tried: bool
    measured: bool


def points_of(evidence: TuningEvidence) -> list[Point]:
    """All configurations with a time: what was tried, and what was measured at length."""
    return [
        *(
            Point(trial, trial.predicted_seconds_per_token, True, trial.source == "measured")
            for trial in evidence.trials
        ),
        *(Point(figure, figure.seconds_per_token, False, True) for figure in evidence.measured),
    ]


def pareto_plot(evidence: TuningEvidence, path: Path) -> Path | None:
    """Seconds per token over divergence from the target, larger marks for more target calls; the
    front of the trials is a line.

    Where nothing diverges (lossless strategies only), that axis would be a single value: target
    calls take its place.
    """
    points = points_of(evidence)
    lossy = any(point.row.divergence for point in points)
    placed = []
    for point in points:
        x = point.row.divergence if lossy else point.row.target_calls_per_token
        if x is not None and math.isfinite(x):
            placed.append((point, (x, point.seconds * 1e3)))
    if not placed:
        return None
    x_label = "divergence from the target" if lossy else "target calls per token (none diverges)"
    sizes = [point.row.target_calls_per_token or 0.0 for point, _ in placed]
    largest = max(sizes) or 1.0
    with drawing(
        path, "What is fast, cheap and faithful at once", x_label, "milliseconds per token"
    ) as axes:
        colours = colours_of(label_of(point.row) for point, _ in placed)
        groups: dict[tuple[str, bool], list[tuple[Place, float]]] = {}
        for (point, place), size in zip(placed, sizes, strict=True):
            key = label_of(point.row), point.measured
            groups.setdefault(key, []).append((place, 20 + 100 * size / largest))
        for (label, measured), marks in groups.items():
            axes.scatter(
                *zip(*(place for place, _ in marks), strict=True),
                marker="D" if measured else "o",
                facecolors=colours[label] if measured else "none",
                edgecolors=colours[label],
                s=[size for _, size in marks],
                label=f"{label}, measured" if measured else label,
            )
        front = lower_left(place for point, place in placed if point.tried)
        axes.plot(
            [x for x, _ in front],
            [y for _, y in front],
            color=FAINT,
            drawstyle="steps-post",
            zorder=0,
            label="front",
        )
        chosen = evidence.choice
        ring(axes, [at for point, at in placed if not point.tried and point.row.choice == chosen])
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
    figures = evidence.measured
    trials, found = grouped(evidence.trials, names), grouped(figures, names)
    several = [
        key
        for key in dict.fromkeys([*trials, *found])
        if len({value for value, _ in (*trials.get(key, ()), *found.get(key, ()))}) > 1
    ]
    if not several:
        return None
    base = next((figure.seconds_per_token for figure in figures if figure.choice == PLAIN), None)
    with drawing(path, "Speed over " + x_label, x_label, "tokens per second") as axes:
        for key, colour in colours_of(several).items():
            draw_predicted(axes, key, trials.get(key, []), colour)
            draw_measured(axes, key, found.get(key, []), base, colour)
            ring(
                axes,
                [
                    (value, 1 / figure.seconds_per_token)
                    for value, figure in found.get(key, [])
                    if figure.choice == evidence.choice
                ],
            )
        if base:
            axes.axhline(1 / base, color=FAINT, linestyle="--", label=f"{PLAIN}, measured")
        axes.set_ylim(bottom=0)
        legend(axes)
    return path


def draw_predicted(axes: Any, key: str, trials: Sequence[tuple[float, Trial]], colour: str) -> None:
    """The line of the fastest trial of each value."""
    if not trials:
        return
    best: dict[float, float] = {}
    for value, trial in trials:
        best[value] = max(best.get(value, 0.0), 1 / trial.predicted_seconds_per_token)
    brief = trials[0][1].source == "measured"
    axes.plot(
        sorted(best),
        [best[value] for value in sorted(best)],
        color=colour,
        marker=".",
        linestyle=":" if brief else "-",
        label=f"{key}, {'tried briefly' if brief else 'predicted'}",
    )


def draw_measured(
    axes: Any, key: str, figures: Sequence[tuple[float, Metrics]], base: float | None, colour: str
) -> None:
    """Marks with the interval of the speedup, where plain decoding (`base`) was measured."""
    if not figures:
        return
    speeds = [1 / figure.seconds_per_token for _, figure in figures]
    bars = None
    if base is not None:
        below = [max(0.0, 1 / f.seconds_per_token - f.speedup_low / base) for _, f in figures]
        above = [max(0.0, f.speedup_high / base - 1 / f.seconds_per_token) for _, f in figures]
        bars = [below, above]
    axes.errorbar(
        [value for value, _ in figures],
        speeds,
        yerr=bars,
        fmt="D",
        color=colour,
        capsize=4,
        label=f"{key}, measured",
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
            key = f"{label_of(row)} ({name})"
            found.setdefault(key, []).append((float(row.parameters[name]), row))
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
