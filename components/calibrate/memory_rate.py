"""How fast the machine reads memory at the moment.

A forward pass over one token is bound by reading the weights. On a shared machine all cores
together read at their full rate at one moment, and at little more than half of it a few seconds
later, while computing is as fast as before. A pass over one token then takes up to 1.4 times as
long, one over eight tokens 1.1 times: a ratio of two strategies depends on which of them met the
slow state.
"""

from __future__ import annotations

import time
from functools import cache

import torch

MEGABYTES = 128
"""Of the block that is read: four times the last cache of small machines. Where that holds the
block, no state of memory is seen."""
READS = 8
"""Readings of which the fastest counts: something else may run for a moment."""
SLOW = 0.7
"""Share of the best rate below which memory is slow. Of the fastest reading of the fast state (74
GB/s on two cores) others of it have at least .74 and those of the slow one at most .61."""
LONGEST = 15.0
"""Seconds of one wait at most."""


class MemoryRate:
    """Reads memory with all threads of torch. The best rate is the machine's: see `memory_rate`."""

    def __init__(self) -> None:
        self.best = 0.0
        self._block = torch.ones(MEGABYTES * 2**20 // 4)

    def read(self) -> float:
        """GB/s of now; takes some 30 ms."""
        rate = max(self._read_once() for _ in range(READS))
        self.best = max(self.best, rate)
        return rate

    def explore(self, seconds: float = 10.0) -> float:
        """Read for some time, so that the best rate is known; that rate, GB/s, an earlier one where
        it is better."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.read()
        return self.best

    def know(self, rate: float) -> None:
        """Take account of a rate that was read earlier on this machine, GB/s."""
        self.best = max(self.best, rate)

    def slow(self, rate: float) -> bool:
        """Whether a rate is well below the best that was read so far.

        >>> memory = MemoryRate()
        >>> memory.best = 50.0
        >>> memory.slow(30.0), memory.slow(45.0)
        (True, False)
        """
        return rate < SLOW * self.best

    def _read_once(self) -> float:
        start = time.perf_counter()
        self._block.amax()
        return self._block.nbytes / (time.perf_counter() - start) / 1e9


@cache
def _of_threads(threads: int) -> MemoryRate:
    return MemoryRate()


def memory_rate() -> MemoryRate:
    """The one of as many threads as torch has now."""
    return _of_threads(torch.get_num_threads())


class Patience:
    """Waits for fast memory, for so many seconds in total.

    Args:
        seconds: of all waits together; where the best rate is not known yet, exploring it comes on
            top.
        waits: how many there will be. None takes more than twice its share of what is left, so that
            the first do not use it up.
    """

    def __init__(self, seconds: float, waits: int = 1):
        self.left, self.waits = seconds, waits

    def wait(self) -> float:
        """Read until the rate is as at its best, or this wait is at its end. It reads all the
        while: idle cores stay in the slow state.

        Returns:
            GB/s of the last reading.
        """
        memory = memory_rate()
        if not memory.best:
            memory.explore()
        start, most = time.monotonic(), min(self.left, LONGEST, 2 * self.left / max(1, self.waits))
        rate = memory.read()
        while memory.slow(rate) and time.monotonic() - start < most:
            rate = memory.read()
        self.left, self.waits = max(0.0, self.left - (time.monotonic() - start)), self.waits - 1
        return rate
