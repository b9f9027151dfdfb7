"""The Pareto front: the points that no other point beats in one respect without losing in
another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from draftwell.serving.errors import DraftwellError


def front(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices, ascending, of the points that no other dominates; of equal points all or none.

    Args:
        points: `[points][objectives]`, each objective to be minimised, all finite.
    Raises:
        DraftwellError: a value that is not finite: nothing dominates a NaN, so it would always be
            on the front.

    >>> front([(1, 5), (2, 2), (3, 3), (2, 2)])
    [0, 1, 3]
    """
    if any(not math.isfinite(value) for point in points for value in point):
        raise DraftwellError(
            "a Pareto front needs finite metrics: repeat the measurement that has none",
            code="measurement_not_finite",
        )
    return [
        i for i, point in enumerate(points) if not any(dominates(other, point) for other in points)
    ]


def dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether a is nowhere worse than b and somewhere better.

    >>> dominates((1, 2), (1, 3)), dominates((1, 2), (1, 2)), dominates((1, 4), (2, 3))
    (True, False, False)
    """
    pairs = list(zip(a, b, strict=True))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)
