"""Passes timed between the texts of a cell: what a formula says of a cell has to know the machine
that its texts met.

A shared machine reads memory at one rate in one minute and at little more than half of it in the
next, so passes that are timed once, before a cell, may take a third longer than those of its texts,
or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from draftwell.components.bench.interleaved import Progress
from draftwell.components.calibrate.hardware_profile import time_forwards, time_overlapped
from draftwell.components.papers.cell_file import Costs
from draftwell.components.papers.formulas import Passes
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.pair import LoadedPair

ROUNDS = 2
"""Of passes with all cores each time, behind a cold one that is dropped."""
OVERLAPPED = 3
"""Of passes on cores of their own each time: the first one is cold, and counts in the median."""


class PassTimes:
    """A `Progress` that times the profile's passes so many times, evenly spread over a cell's
    texts; none of it falls into a text.

    Args:
        profile: whose passes, after a context as long as its; one without `details` does not say
            how long that is, and nothing is timed.
        times: how often; less often where a cell has fewer texts.
        progress: called after it.
    """

    def __init__(
        self,
        pair: LoadedPair,
        profile: HardwareProfile,
        times: int,
        progress: Progress | None = None,
    ):
        self.pair, self.profile, self.progress = pair, profile, progress
        self.times = times if profile.details else 0
        self.timed: list[Costs] = []

    def __call__(self, done: int, total: int, label: str) -> None:
        due = (2 * len(self.timed) + 1) * total / (2 * self.times) if self.times else total
        if len(self.timed) < self.times and 0 < done < total and done >= due:
            self.timed.append(self._time())
        if self.progress:
            self.progress(done, total, label)

    def costs(self) -> Costs:
        """Medians over all times; the profile's where nothing was timed."""
        known = Costs.of(self.profile)
        if not self.timed:
            return known
        draft, verify = medians([(each.t_draft, each.t_verify) for each in self.timed])
        return Costs(
            t_draft=draft,
            t_verify=verify,
            t_rest=known.t_rest,
            alone=known_medians([each.alone for each in self.timed]),
            busy=known_medians([each.busy for each in self.timed]),
        )

    def _time(self) -> Costs:
        sizes, details, rest = (
            list(self.profile.t_verify),
            self.profile.details,
            self.profile.t_rest,
        )
        assert details is not None
        seconds = time_forwards(self.pair, sizes, ROUNDS, details.context)
        draft, verify = (
            median(seconds["draft", 1]),
            {size: median(seconds["target", size]) for size in sizes},
        )
        if self.profile.split is None:
            return Costs(t_draft=draft, t_verify=verify, t_rest=rest)
        alone, busy = (
            time_overlapped(self.pair, sizes, OVERLAPPED, details.context, busy=both)
            for both in (False, True)
        )
        return Costs(t_draft=draft, t_verify=verify, t_rest=rest, alone=alone, busy=busy)


def medians(timed: Sequence[Passes]) -> Passes:
    """Medians of passes that were timed several times.

    >>> medians([(1.0, {1: 4.0}), (9.0, {1: 6.0}), (2.0, {1: 11.0})])
    (2.0, {1: 6.0})
    """
    return median(draft for draft, _ in timed), {
        size: median(verify[size] for _, verify in timed) for size in timed[0][1]
    }


def known_medians(timed: Sequence[Passes | None]) -> Passes | None:
    """The same of passes that are not timed on every pair."""
    known = [passes for passes in timed if passes is not None]
    return medians(known) if known else None
