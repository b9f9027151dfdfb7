"""Lines of the plane on which one method is as fast as another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq

from draftwell.components.regimes.speedups import FLAT, METHODS, Pair, Placement

ALPHAS = tuple(np.linspace(0.005, 0.995, 100).tolist())
"""Between which a crossing is looked for."""


def advantage(
    name: str, base: str, placement: Placement, verify: Mapping[int, float] = FLAT
) -> Callable[[float, float], float]:
    """(c, α) → how much faster a method is than another one, as a ratio less 1."""

    def ahead(c: float, alpha: float) -> float:
        pair = Pair(c, alpha, verify)
        return METHODS[name](pair, placement) / METHODS[base](pair, placement) - 1

    return ahead


def break_even_alphas(
    name: str, base: str, c: float, placement: Placement, verify: Mapping[int, float] = FLAT
) -> list[float]:
    """Acceptances at which both methods are equally fast, ascending; none where one of them always
    is the faster.

    Args:
        c: cost of a draft pass.
        verify: as a pair's.
    """
    ahead = advantage(name, base, placement, verify)
    return crossings(lambda alpha: ahead(c, alpha), ALPHAS)


def break_even_costs(
    name: str, base: str, alpha: float, placement: Placement, costs: Iterable[float]
) -> list[float]:
    """Costs at which both are equally fast, of those between the given ones."""
    ahead = advantage(name, base, placement)
    return crossings(lambda c: ahead(c, alpha), costs)


def crossings(function: Callable[[float], float], places: Iterable[float]) -> list[float]:
    """Where a function changes its sign, once between two places that have different signs.

    >>> [round(place, 6) for place in crossings(lambda x: x * x - 4, (0, 1, 3, 5))]
    [2.0]
    """
    points = [(place, function(place)) for place in places]
    return [
        float(brentq(function, left, right, xtol=1e-9))
        for (left, below), (right, above) in pairwise(points)
        if below * above < 0
    ]
