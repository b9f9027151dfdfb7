"""Passes timed between the texts of a cell: what a formula says of a cell has to know the machine that its texts met.

A shared machine reads memory at one rate in one minute and at little more than half of it in the next, so passes that are timed once,
before a cell, may take a third longer than those of its texts, or less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from components.bench.runner import Progress
from components.calibrate.hardware_profile import time_forwards, time_overlapped
from components.calibrate.memory_rate import Patience
from components.papers.cell_file import Costs, Passes
from serving.artifacts.hardware_profile import HardwareProfile
from serving.runtime.pair import LoadedPair

ROUNDS = 2
"""Of passes that count, each time."""
SHARE = 0.2
"""Of a cell's patience that may go into waiting before passes."""
WAITS = ROUNDS + 1 + 2
"""Of each time: before every round, the cold one among them, and before overlapped passes, the other model busy and idle."""


class PassTimes:
    """A `Progress` that times the profile's passes so many times, evenly spread over a cell's texts; none of it falls into a text.

    Args:
        profile: whose passes, after a context as long as its.
        times: how often.
        progress: called behind it.
        patience: seconds of the cell that may go into waiting for fast memory, on CPUs.
    """

    def __init__(self, pair: LoadedPair, profile: HardwareProfile, times: int, progress: Progress | None = None, patience: float = 0.0):
        self.pair, self.profile, self.times, self.progress = pair, profile, times, progress
        self.timed: list[Costs] = []
        waits = patience > 0 and pair.device == "cpu"
        self.wait: Callable[[], object] | None = Patience(SHARE * patience, times * WAITS).wait if waits else None

    def __call__(self, done: int, total: int, label: str) -> None:
        if done and len(self.timed) < self.times and done * 2 * self.times >= total * (2 * len(self.timed) + 1):
            self.timed.append(self._time())
        if self.progress:
            self.progress(done, total, label)

    def costs(self) -> Costs:
        """Medians over all times; the profile's where nothing was timed."""
        known = Costs.of(self.profile)
        if not self.timed:
            return known
        alone, busy = (between([passes for passes in found if passes]) if all(found) else None
                       for found in ([each.alone for each in self.timed], [each.busy for each in self.timed]))
        draft, verify = between([(each.t_draft, each.t_verify) for each in self.timed])
        return Costs(t_draft=draft, t_verify=verify, t_rest=known.t_rest, alone=alone, busy=busy)

    def _time(self) -> Costs:
        sizes, details = list(self.profile.t_verify), self.profile.details
        context = details.context if details else 0
        seconds = time_forwards(self.pair, sizes, ROUNDS, context, before_round=self.wait)
        draft, verify = median(seconds["draft", 1]), {size: median(seconds["target", size]) for size in sizes}
        if details is None or details.split_alone is None:
            return Costs(t_draft=draft, t_verify=verify, t_rest=self.profile.t_rest)
        alone, busy = (time_overlapped(self.pair, sizes, ROUNDS, context, busy=both, before_round=self.wait) for both in (False, True))
        return Costs(t_draft=draft, t_verify=verify, t_rest=self.profile.t_rest, alone=alone, busy=busy)


def between(timed: Sequence[Passes]) -> Passes:
    """Medians of passes that were timed several times.

    >>> between([(1.0, {1: 4.0}), (3.0, {1: 6.0}), (2.0, {1: 8.0})])
    (2.0, {1: 6.0})
    """
    return median(draft for draft, _ in timed), {size: median(verify[size] for _, verify in timed) for size in timed[0][1]}
