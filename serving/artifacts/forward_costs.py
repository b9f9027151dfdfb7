"""The cost model of forward passes: seconds by number of tokens, known at a few measured sizes.

Everything that predicts time reads it here: the hardware profile, replay and strategies that weigh
their drafts. Plain numbers, no models.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

ONE_PASS = 1.25
"""A pass over several tokens that takes at most so many times one over a single token counts as
one: it is spent on reading the weights."""


def seconds_at(seconds: Mapping[int, float], tokens: int) -> float:
    """Seconds of a forward pass over `tokens` tokens: linear between measured sizes and beyond the
    last.

    Args:
        seconds: tokens → seconds, not empty; a single size holds for all.

    >>> seconds_at({1: 4.0, 3: 8.0}, 2), seconds_at({1: 4.0, 3: 8.0}, 5), seconds_at({1: 4.0}, 9)
    (6.0, 12.0, 4.0)
    """
    known = sorted(seconds)
    if len(known) == 1:
        return seconds[known[0]]
    high = next((i for i, size in enumerate(known) if size >= tokens and i > 0), len(known) - 1)
    left, right = known[high - 1], known[high]
    return seconds[left] + (seconds[right] - seconds[left]) * (tokens - left) / (right - left)


def seconds_table(seconds: Mapping[int, float], count: int) -> list[float]:
    """Seconds of 0 to `count` tokens, for many look-ups: as `seconds_at`, but never falling beyond
    the last measured size.

    >>> seconds_table({1: 1.0, 3: 2.0}, 4)
    [1.0, 1.0, 1.5, 2.0, 2.5]
    """
    known = sorted(seconds)
    table: list[float] = np.interp(
        np.arange(count + 1), known, [seconds[size] for size in known]
    ).tolist()
    last = known[-1]
    if len(known) > 1 and count > last:
        slope = max(0.0, (seconds[last] - seconds[known[-2]]) / (last - known[-2]))
        table[last:] = [seconds[last] + slope * further for further in range(count + 1 - last)]
    return table


def ascending(seconds: Mapping[int, float]) -> dict[int, float]:
    """Seconds without the noise by which more tokens seem to take less time: each at most those of
    every larger size.

    >>> ascending({1: 0.5, 2: 0.25, 4: 1.0})
    {1: 0.25, 2: 0.25, 4: 1.0}
    """
    sizes = sorted(seconds)
    return {size: min(seconds[other] for other in sizes[i:]) for i, size in enumerate(sizes)}


def in_one_pass(t_verify: Mapping[int, float], most: int = 64) -> int:
    """How many tokens the target verifies in about the time of one, by the measured sizes without
    their noise (`ascending`); `most` where that holds for all of them.

    Args:
        t_verify: tokens → seconds, with one token among them.

    >>> in_one_pass({1: 1.0, 4: 1.1, 8: 1.2, 16: 2.0}), in_one_pass({1: 1.0, 4: 1.5, 8: 1.2})
    (8, 64)
    """
    times = ascending(t_verify)
    fast = [tokens for tokens in times if times[tokens] <= ONE_PASS * times[1]]
    return most if len(fast) == len(times) else min(most, fast[-1])
