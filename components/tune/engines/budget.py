"""Time that a tuning may take: a measurement begins only where there is time for it and for what
has to follow it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

NO_TIME = "there was no time left to measure it"


class Budget:
    """What is left of the time, and what measurements cost so far.

    Args:
        seconds: in all, from now; None: as many as it takes.
        clock: seconds, ascending.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds
        self._starts: list[float] = []
        self._groups: dict[int, list[float]] = defaultdict(list)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """An engine starts in the block."""
        begun = self._clock()
        yield
        self._starts.append(self._clock() - begun)

    @contextmanager
    def decoding(self, at_once: int, groups: int) -> Iterator[None]:
        """So many groups of `at_once` requests are measured in the block."""
        begun = self._clock()
        yield
        self._groups[at_once].append((self._clock() - begun) / groups)

    def cost(self, measurements: Sequence[tuple[int, int]]) -> float:
        """Seconds that one engine will take to start and to measure all of these, by the mean of
        those before; 0 before the first.

        Args:
            measurements: (requests at once, groups). A load that was not measured yet counts as the
                highest one below it that was.
        """
        seconds = fmean(self._starts) if self._starts else 0.0
        for at_once, groups in measurements:
            known = [level for level in self._groups if level <= at_once]
            seconds += groups * (fmean(self._groups[max(known)]) if known else 0.0)
        return seconds

    def allows(self, *engines: Sequence[tuple[int, int]]) -> bool:
        """Whether there is time for all of these engines, one after the other, each with its
        measurements."""
        return self._clock() + sum(self.cost(one) for one in engines) <= self._end
