"""The regime maps as pictures, one for each placement.

python -m draftwell.components.regimes docs/images
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftwell.components.regimes.lines import break_even_alphas, break_even_costs
from draftwell.components.regimes.points import Point
from draftwell.components.regimes.speedups import FLAT, Pair, Placement, pearl, sd, spide
from draftwell.components.report.drawing import FAINT, INK, SECOND, drawing

FILES = {Placement.IN_TURN: "regimes-in-turn.png", Placement.OWN: "regimes-own-device.png"}
TITLES = {
    Placement.IN_TURN: "One device in turn: SD over plain decoding, by formula",
    Placement.OWN: "Draft on a device of its own: SPIDE or PEARL over SD, by formula",
}
COSTS = (0.012, 0.6)
"""Ends of the axis of c."""
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5)
GRID = 90
"""Places of an axis at which a speed-up is computed."""
SPEEDS, GAINS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0), (1.02, 1.05, 1.1, 1.2, 1.3)
"""Of the contours: SD over plain decoding, the faster of SPIDE and PEARL over SD."""
CROWDED = 0.14
"""Names stand on the left of points that are cheaper than that."""
PLAIN_SHADE, GAIN_SHADE = "#eceff2", "#dbe7f3"


def draw_map(placement: Placement, points: Sequence[Point], path: Path) -> Path:
    """One map: contours of the speed-up, break-even lines, and the pairs as points.

    Args:
        points: those of other placements are left out.
    """
    shown = [point for point in points if point.placement is placement]
    axis = "c: seconds of a draft pass over those of a target pass"
    with drawing(path, TITLES[placement], axis, "acceptance α of a draft token", 5.6) as axes:
        axes.set(xscale="log", xlim=COSTS, ylim=(0, 1.02))
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.minorticks_off()
        if placement is Placement.IN_TURN:
            draw_in_turn(axes, curve_of(shown))
        else:
            draw_own(axes)
        draw_points(axes, shown)
        axes.legend(frameon=True, framealpha=0.9, fontsize=8, loc="lower right")
    return path


def curve_of(points: Sequence[Point]) -> Mapping[int, float]:
    """The median verification curve of measured pairs on a processor."""
    curves = [p.pair.verify for p in points if "padded" not in p.source and len(p.pair.verify) > 1]
    if not curves:
        return FLAT
    return {size: float(np.median([curve[size] for curve in curves])) for size in curves[0]}


def draw_in_turn(axes: Any, curve: Mapping[int, float]) -> None:
    """Where SD pays with the models in turn, and where a lossy method is faster."""
    costs = np.geomspace(*COSTS, GRID)
    even = line("SD", "plain decoding", costs, Placement.IN_TURN)
    axes.fill_between(costs, 0, even, color=PLAIN_SHADE)
    axes.text(0.4, 0.27, "plain\ndecoding", color=INK, fontsize=9)
    axes.plot(costs, even, color=INK, label="SD = plain, verification flat")
    if len(curve) > 1:
        measured = line("SD", "plain decoding", costs, Placement.IN_TURN, curve)
        axes.plot(
            costs, measured, color=INK, linestyle="--", label="SD = plain, our processor's passes"
        )
    axes.plot(
        costs,
        line("SPRINTER", "SD", costs, Placement.IN_TURN),
        color="#548235",
        linestyle="-.",
        label="SPRINTER = SD (lossy: faster below)",
    )
    contours(axes, lambda c, alpha: sd(Pair(c, alpha)), SPEEDS, "{:g} ×")


def draw_own(axes: Any) -> None:
    """Where drafting during the verification pays, on two devices that do not slow each other."""
    costs, alphas = np.geomspace(*COSTS, GRID), np.linspace(0.02, 0.99, GRID)
    found = [break_even_costs("DuoDecoding", "SD", a, Placement.OWN, costs) for a in alphas]
    even = np.array([crossed[0] if crossed else COSTS[0] for crossed in found])
    axes.fill_betweenx(alphas, even, COSTS[1], color=GAIN_SHADE)
    axes.plot(even, alphas, color=SECOND, label="DuoDecoding, PEARL = SD (faster to the right)")

    def gain(c: float, alpha: float) -> float:
        pair = Pair(c, alpha)
        return max(spide(pair, Placement.OWN), pearl(pair, Placement.OWN)) / sd(pair)

    contours(axes, gain, GAINS)


def line(
    name: str,
    base: str,
    costs: Sequence[float] | np.ndarray,
    placement: Placement,
    verify: Mapping[int, float] = FLAT,
) -> np.ndarray:
    """c → the largest acceptance at which two methods are equally fast; nan without one."""
    found = [break_even_alphas(name, base, c, placement, verify) for c in costs]
    return np.array([crossed[-1] if crossed else np.nan for crossed in found])


def contours(axes: Any, speed: Any, levels: Sequence[float], label: str = "{:.2f} ×") -> None:
    """Lines of equal speed-up, with their values."""
    costs, alphas = np.geomspace(*COSTS, GRID), np.linspace(0.02, 0.99, GRID)
    values = np.array([[speed(c, alpha) for c in costs] for alpha in alphas])
    drawn = axes.contour(costs, alphas, values, levels=levels, colors=FAINT, linewidths=1.0)
    axes.clabel(drawn, fmt=label.format, fontsize=8, colors="#5b6875")


def draw_points(axes: Any, points: Sequence[Point]) -> None:
    """Crosses for the papers' pairs, dots for ours; of several points of a pair the one with the
    largest acceptance has the name, and SPIDE's speed over SD where that was replayed."""
    for ours, marker, colour, label in (
        (False, "x", SECOND, "the papers' pairs"),
        (True, "o", INK, "ours"),
    ):
        own = [point for point in points if point.ours == ours]
        if not own:
            continue
        replayed = any(point.over_sd for point in own)
        axes.scatter(
            [point.pair.c for point in own],
            [point.pair.alpha for point in own],
            marker=marker,
            color=colour,
            s=28,
            zorder=4,
            label=f"{label}, and SPIDE over SD in a replay" if replayed else label,
        )
        for name in dict.fromkeys(point.name for point in own):
            best = max((one for one in own if one.name == name), key=lambda one: one.pair.alpha)
            left = best.pair.c < CROWDED or bool(best.over_sd)
            axes.annotate(
                name_of(best),
                (best.pair.c, best.pair.alpha),
                xytext=(-5 if left else 5, 2 if best.pair.alpha > 0.96 else -4),
                textcoords="offset points",
                ha="right" if left else "left",
                fontsize=7.5,
                color=colour,
            )


def name_of(point: Point) -> str:
    """A pair's name as it fits beside its point: the target of a paper's, the draft of ours.

    >>> pair = Pair(0.1, 0.9)
    >>> name_of(Point("Qwen3 1.7B & 32B", "SPIDE, GSM8K", Placement.OWN, pair))
    'Qwen3 32B'
    >>> name_of(Point("TinyLlama 1.1B & CodeLlama 34B", "SPIDE", Placement.OWN, pair))
    'CodeLlama 34B'
    """
    first, _, target = point.name.partition(" & ")
    if not target:
        gain = point.over_sd.get("SPIDE")
        name = first.removeprefix("smollm2-135m-")
        return name if gain is None else f"{name} {gain:.2f}"
    return target if " " in target else f"{first.rpartition(' ')[0]} {target}"
