"""Pearson's test of counted outputs against a law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

SMALLEST_EXPECTED = 5.0
"""Cells that expect fewer are thrown together, as the chi-square approximation wants it."""


def p_value(samples: Iterable[Any], law: Mapping[Any, float]) -> float:
    """Probability of counts at least as far from `law` if it holds; 0 if something impossible was
    counted.

    >>> p_value(["a"] * 50 + ["b"] * 50, {"a": 0.5, "b": 0.5})
    1.0
    """
    counts = Counter(samples)
    n = sum(counts.values())
    if any(law.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    cells = [(counts[outcome], n * law[outcome]) for outcome in sorted(law, key=law.__getitem__)]
    rare = [cell for cell in cells if cell[1] < SMALLEST_EXPECTED]
    cells = [cell for cell in cells if cell[1] >= SMALLEST_EXPECTED]
    if rare:
        cells.append((sum(c for c, _ in rare), sum(e for _, e in rare)))
    statistic = sum((counted - expected) ** 2 / expected for counted, expected in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.double)))
