"""As many compute threads as there are cores that no other process uses.

libgomp's threads meet at a barrier after every operation, a few hundred times a forward pass. If
another process runs on one of their cores, all wait there until the system gives that core back:
two threads next to one busy process decode at a quarter of their speed (31 tokens/s → 8), one
thread at .55 to .9 of it. So the thread that steps an engine asks between two steps: a core
that others use is given up within a second, and taken again when it was free in `CALM` readings.
What is read is who used the cores, never how fast steps were, which depends on requests: on an idle
machine nothing changes, whatever is decoded.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch

from draftwell.serving.device import core_ids, default_threads, device_type

log = logging.getLogger(__name__)

WINDOW = 0.5
"""Seconds of a reading at least: the system counts in hundredths."""
CALM = 6
"""Windows in a row after which a core counts as free again."""
LOST = 0.25
"""Cores that others use on average when one thread less is faster; below that the scheduler finds
room for them."""
FREE = 0.15
"""Cores that others may use when one thread more is taken; less than `LOST`, so that a steady load
changes nothing twice."""
PAUSE = 4 * WINDOW
"""Seconds after which a window in which this process used less than half a core tells of a pause,
and nothing of the cores of now."""
STAT = Path("/proc/stat")


class CoreTimes(NamedTuple):
    """Seconds up to a moment: of a clock, of all cores together that no process used, and of this
    process on them."""

    clock: float
    unused: float
    own: float


class ThreadGovernor:
    """Sets torch's threads of the thread that asks.

    Args:
        most: threads on an idle machine; with 1 nothing is ever read or set.
        read: the times of now, or None where the system does not tell: nothing changes then.
        clock: seconds.
    """

    def __init__(
        self,
        most: int,
        read: Callable[[], CoreTimes | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.most = self.threads = most
        self._read, self._clock = read or core_times, clock
        self._free: deque[float] = deque(maxlen=CALM)
        self._last = self._read() if most > 1 else None
        self._due = clock() + WINDOW

    def check(self) -> None:
        """To be called between two steps: mostly a look at the clock."""
        if self.most == 1:
            return
        if self._clock() >= self._due:
            self._take_reading()
            self._due = self._clock() + WINDOW
        # also where another thread asked before, each has a number of its own
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def _take_reading(self) -> None:
        last, now = self._last, self._read()
        # another engine's thread has just asked
        if last and now and now.clock - last.clock < WINDOW / 2:
            return
        self._last = now
        if last is None or now is None:
            return
        # idle, or stopped, for most of the time
        if now.clock - last.clock > PAUSE and now.own - last.own < (now.clock - last.clock) / 2:
            return
        self._free.append(
            (now.unused - last.unused + now.own - last.own) / (now.clock - last.clock)
        )
        wanted = next_threads(self.threads, self.most, self._free)
        if wanted != self.threads:
            log.info(
                "%.1f cores are free of other processes: computing with %d of %d threads",
                self._free[-1],
                wanted,
                self.most,
            )
            self.threads = wanted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The calling thread computes with all threads again."""
        if self.most > 1:
            torch.set_num_threads(self.most)


def governor_for(threads: int | None, device: str) -> ThreadGovernor | None:
    """What adapts the threads where nobody named a number and the models compute on the CPU;
    elsewhere None."""
    return (
        ThreadGovernor(default_threads())
        if threads is None and device_type(device) == "cpu"
        else None
    )


def next_threads(threads: int, most: int, free: Sequence[float]) -> int:
    """Threads to compute with from here on.

    Args:
        threads, most: in force now; on an idle machine.
        free: cores that no other process used, in each of the last windows, at most `CALM`, the
            newest last.

    >>> (
    ...     next_threads(2, 2, [2.0, 1.3]),
    ...     next_threads(1, 2, [2.0] * CALM),
    ...     next_threads(1, 2, [1.0] + [2.0] * (CALM - 1)),
    ... )
    (1, 2, 1)
    """
    left = max(1, math.floor(free[-1] + LOST))
    if left < threads:
        return left
    if len(free) == CALM:
        return min(most, max(threads, math.floor(min(free) + FREE)))
    return threads


def core_times() -> CoreTimes | None:
    """The times of now, of the cores that this process may run on (proc(5), /proc/stat).

    Time that a hypervisor took counts as unused: it takes from any number of threads alike.
    """
    try:
        rows = [line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return None
    cores = {f"cpu{number}" for number in core_ids()}
    # idle, waiting for disks, hypervisor
    unused = [sum(map(int, (row[4], row[5], row[8]))) for row in rows if row[0] in cores]
    if len(unused) != len(cores):  # a container that is shown other cores than it has
        return None
    return CoreTimes(time.monotonic(), sum(unused) / os.sysconf("SC_CLK_TCK"), time.process_time())
