"""The decision: the fastest configuration that keeps to the constraints and is surely faster than
plain decoding, and why."""

from __future__ import annotations

from collections.abc import Sequence

from draftwell.components.report.intervals import FEWEST_PROMPTS
from draftwell.components.tune.evidence import Metrics
from draftwell.components.tune.successive_halving import speedup_of
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice


def decide(
    figures: Sequence[Metrics], tail: float, tried: int, allowed: int
) -> tuple[StrategyChoice, str]:
    """The fastest choice that is allowed and whose speedup's lower bound is at least 1, else plain
    decoding; and why, in a sentence.

    Fewer prompts than `FEWEST_PROMPTS` choose nothing but plain decoding.

    Args:
        figures: of the confirmation; the first is plain decoding's. `objection` is the constraint
            that a configuration breaks.
        tail: of their intervals.
        tried, allowed: how many configurations were predicted or explored, and how many of these
            keep to the constraints.
    """
    others = sorted(figures[1:], key=lambda figure: -speedup_of(figure))
    fitting = [figure for figure in others if figure.objection is None]
    sure = [figure for figure in fitting if (figure.speedup_low or 0.0) >= 1.0]
    prompts = figures[0].prompts or 0
    if fitting and prompts < FEWEST_PROMPTS:
        return PLAIN, (
            f"{PLAIN}, because {prompts} prompts are too few to choose anything else: "
            "measure on at least "
            f"{FEWEST_PROMPTS}; the best there, {fitting[0].choice}, was "
            f"{fitting[0].speedup:.2f} times as fast"
        )
    if sure:
        best = sure[0]
        return best.choice, (
            f"{best.choice} is {best.speedup:.2f} times as fast as {PLAIN} (at least "
            f"{best.speedup_low:.2f} times, "
            f"one-sided {100 * (1 - tail):.1f} %)"
        )
    if fitting:
        best = fitting[0]
        return PLAIN, (
            f"{PLAIN}, because nothing is surely faster: the best, {best.choice}, measured "
            f"{best.speedup:.2f} times its "
            f"speed with a lower bound of {best.speedup_low:.2f}"
        )
    if others:
        return (
            PLAIN,
            (
                f"{PLAIN}, because nothing keeps to the constraints: {others[0].choice} does "
                f"not, {others[0].objection}"
            ),
        )
    if tried and not allowed:
        return PLAIN, f"{PLAIN}, because none of {tried} configurations keeps to the constraints"
    return PLAIN, f"{PLAIN}, because there was nothing to compare it with"
