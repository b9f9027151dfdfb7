"""How fast the machine reads memory at the moment.

A forward pass over one token is bound by reading the weights. On a shared machine all cores together read at their full rate at one
moment, and at little more than the rate of one core a few seconds later, while computing is as fast as before. A pass over one token then
takes up to 1.4 times as long, one over eight tokens hardly longer: a ratio of two strategies depends on which of them met the slow state.
"""

from __future__ import annotations

import time
from functools import cache

import torch

MEGABYTES = 128
"""Of the block that is read: several times a processor's last cache."""
READS = 8
"""Readings of which the fastest counts: something else may run for a moment."""
SLOW = 0.75
"""Share of the best rate below which memory is slow. Readings in one state differ by a tenth, those in two by a third or more."""
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
        """Read for some time, so that the best rate is known; GB/s of it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.read()
        return self.best

    def know(self, rate: float) -> None:
        """Of a rate that was read earlier on this machine, GB/s."""
        self.best = max(self.best, rate)

    def slow(self, rate: float) -> bool:
        """Whether a rate is well below the best that was read so far.

        >>> memory = MemoryRate()
        >>> memory.best = 50.0
        >>> memory.slow(35.0), memory.slow(45.0)
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
        seconds: 0 never waits.
    """

    def __init__(self, seconds: float):
        self.left = seconds

    def wait(self) -> float:
        """Read until the rate is as at its best, or patience is at an end: reading keeps the cores busy, which idle ones would not leave.

        Returns:
            GB/s of the last reading.
        """
        memory, start = memory_rate(), time.monotonic()
        rate, most = memory.read(), min(self.left, LONGEST)
        while memory.slow(rate) and time.monotonic() - start < most:
            rate = memory.read()
        self.left -= time.monotonic() - start
        return rate
