"""The regret of a choice for another engine: by how much the best of what was measured is faster
than what was chosen.

By the tuning's own figures it is too low, because they made the choice: what was lucky in them was
chosen. The choice owes nothing to a grid that is measured again, the choice included
(`draftwell.components.tune.engines.tune.grid_of`). The best of that grid is partly the best by
luck, so the estimate and the upper end are rather too high.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from draftwell.components.bench.engines.figures import TAIL, by_prompt
from draftwell.components.bench.engines.measure import Beside
from draftwell.components.engines.port import Message
from draftwell.components.engines.vllm_methods import OFF
from draftwell.components.report.intervals import (
    expanded_tail,
    percentile_ends,
    resample,
    resamples_for,
)
from draftwell.components.tune.engines.choice import EngineChoice


class Regret(Message):
    """How far a choice is behind the best of a grid, one request at a time."""

    best: str = Field(
        description="label of the fastest setting; the choice itself where nothing was faster"
    )
    regret: float = Field(ge=0, description="speed of the best over that of the choice, minus 1")
    low: float | None = Field(
        None, description="of an interval over prompts; None where it was not computed"
    )
    high: float | None = Field(
        None,
        description="also above 0 where the choice leads: another one may be faster all the same",
    )
    settings: int = Field(description="that were measured, besides plain decoding")


def regret_of(choice: EngineChoice) -> Regret:
    """By the tuning's own figures: settings that were confirmed are compared on all prompts, others
    on those that all were explored on.

    Above 0 where something faster was passed over, because it was not surely faster than plain
    decoding, did not pay at other loads, or was not confirmed. Where the choice was measured beside
    another one, only that counts. It is no estimate of the regret on other prompts: of what is
    equally fast, the luckiest was chosen.
    """
    own = choice.alone.label
    best, most = own, 0.0
    beside = {
        final.winner if final.loser == own else final.loser: final
        for final in choice.finals
        if own in (final.winner, final.loser)
    }
    for label, final in beside.items():
        if final.winner == label and final.ratio - 1 > most:
            best, most = label, final.ratio - 1
    for figures in (choice.confirmed, choice.explored):
        ratios = {OFF: 1.0, **{figure.label: figure.ratio for figure in figures}}
        confirmed = (
            {figure.label for figure in choice.confirmed} if figures is choice.explored else set()
        )
        for label, ratio in ratios.items():
            if label in beside:
                continue
            if own in ratios and label not in confirmed and ratio / ratios[own] - 1 > most:
                best, most = label, ratio / ratios[own] - 1
    return Regret(best=best, regret=most, settings=len(choice.explored))


def grid_regret(choice: EngineChoice, grid: Mapping[str, Beside]) -> Regret | None:
    """By a grid that was measured on all prompts after the choice was made, with an interval over
    these.

    A setting's speed is that of `figure_of`: plain decoding's seconds a token over its own, both
    summed over prompts. In each resample of prompts the fastest setting is compared with the
    choice, which gives the upper end; the lower end is the highest of all settings' own lower ends,
    which share what is left out.

    Args:
        grid: label → measurement at one request at a time, all of the same prompts.
    Returns:
        None where the choice was not measured, or nothing was.
    """
    own = choice.alone.label
    labels = [OFF, *grid]
    if not grid or own not in labels:
        return None
    sums = np.array([sums_of(beside) for beside in grid.values()])
    prompts = sums.shape[-1]
    tail, shared = (expanded_tail(one, prompts) for one in (TAIL, TAIL / len(grid)))
    drawn = resample(prompts, resamples_for(shared, prompts), seed=0, counts=True).T
    over = over_choice(speeds(sums.sum(-1, keepdims=True)), labels.index(own))[:, 0]
    resampled = over_choice(speeds(sums @ drawn), labels.index(own))
    best = int(over.argmax()) if over.max() > 1 else labels.index(own)
    low, high = (
        percentile_ends(resampled.T, shared)[0].max(),
        percentile_ends(resampled.max(0), tail)[1],
    )
    regret = float(over[best]) - 1
    return Regret(
        best=labels[best],
        regret=regret,
        low=min(regret, max(0.0, float(low) - 1)),
        high=max(regret, float(high) - 1),
        settings=len(grid),
    )


def sums_of(beside: Beside) -> tuple[list[float], list[int], list[float], list[int]]:
    """Seconds and tokens of each distinct prompt, plain decoding's first."""
    return (*by_prompt(beside.plain, beside.prompts), *by_prompt(beside.other, beside.prompts))


def speeds(sums: np.ndarray) -> np.ndarray:
    """Times plain decoding `[1 + settings, resamples]`, plain decoding itself first.

    Args:
        sums: `[settings, 4, resamples]`, of `sums_of`.
    """
    others = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    return np.concatenate([np.ones_like(others[:1]), others])


def over_choice(speed: np.ndarray, own: int) -> np.ndarray:
    """Speeds `[settings, resamples]` over that of the row `own`."""
    over: np.ndarray = speed / speed[own]
    return over
