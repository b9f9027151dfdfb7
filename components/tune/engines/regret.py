"""The regret of a choice for another engine: by how much the best of what was measured is faster than what was chosen.

The best of many is partly the best by luck, so a regret is more often too high than too low.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from components.bench.engines.figures import TAIL, by_prompt
from components.bench.engines.measure import Beside
from components.engines.port import Message
from components.engines.vllm_methods import OFF
from components.report.intervals import expanded_tail, paired_bootstrap_ratio
from components.tune.engines.tune import EngineChoice


class Regret(Message):
    """How far a choice is behind the best of a grid, one request at a time."""

    best: str = Field(description="label of the fastest setting; the choice itself where nothing was faster")
    regret: float = Field(ge=0, description="speed of the best over that of the choice, minus 1")
    low: float | None = Field(None, description="of an interval over prompts; None where it was not computed")
    high: float | None = None
    settings: int = Field(description="that were measured, besides plain decoding")


def regret_of(choice: EngineChoice) -> Regret:
    """By the tuning's own figures: settings that were confirmed are compared on all prompts, others on those that all were explored on."""
    own = chosen_label(choice)
    best, most = own, 0.0
    for figures in (choice.confirmed, choice.explored):
        ratios = {OFF: 1.0, **{figure.label: figure.ratio for figure in figures}}
        confirmed = {figure.label for figure in choice.confirmed} if figures is choice.explored else set()
        for label, ratio in ratios.items():
            if own in ratios and label not in confirmed and ratio / ratios[own] - 1 > most:
                best, most = label, ratio / ratios[own] - 1
    return Regret(best=best, regret=most, settings=len(choice.explored))


def grid_regret(choice: EngineChoice, grid: Mapping[str, Beside]) -> Regret:
    """By a grid that was measured on all prompts, with an interval over these.

    Args:
        grid: label → measurement at one request at a time, that of the choice among them unless it is plain decoding.
    """
    own = chosen_label(choice)
    seconds = {label: relative_seconds(beside) for label, beside in grid.items()}
    count = len(next(iter(seconds.values())))
    seconds[OFF] = [1.0] * count
    best = min(seconds, key=lambda label: sum(seconds[label]))
    if sum(seconds[best]) >= sum(seconds[own]):
        return Regret(best=own, regret=0.0, low=0.0, high=0.0, settings=len(grid))
    ones = [1] * count
    ratio, low, high = paired_bootstrap_ratio(seconds[own], ones, seconds[best], ones, tail=expanded_tail(TAIL, count))
    return Regret(best=best, regret=max(0.0, ratio - 1), low=low - 1, high=high - 1, settings=len(grid))


def relative_seconds(beside: Beside) -> list[float]:
    """Seconds a token of each distinct prompt, in units of plain decoding's in the same run: runs of other minutes become comparable."""
    (plain, plain_tokens), (other, tokens) = by_prompt(beside.plain, beside.prompts), by_prompt(beside.other, beside.prompts)
    return [(two / n) / (one / m) for one, m, two, n in zip(plain, plain_tokens, other, tokens, strict=True)]


def chosen_label(choice: EngineChoice) -> str:
    """The setting that answers one request at a time, as it was confirmed."""
    k = choice.levels[0].k if choice.levels else choice.k
    return choice.chosen.with_k(k).label if k else OFF

