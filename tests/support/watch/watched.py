"""Judged runs of the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from draftwell.components.watch.baseline import Baseline
from draftwell.components.watch.judge import history
from draftwell.components.watch.schema import Alarm, Probe, WatchLimits
from draftwell.components.watch.window import Window, windows_of
from tests.support.watch.simulator import BEGIN, Faults, Run, simulate

BEGINS = 200
"""Minute at which the planted silences begin, after a baseline of two hours."""


@dataclass
class Watched:
    """A run with what was made of it."""

    run: Run
    windows: list[Window]
    baseline: Baseline
    probes: list[Probe]

    def at(self, minute: int, *, probes: bool = True) -> list[Alarm]:
        """What had been raised by this minute after `BEGINS`, as the watchdog knew then."""
        now = BEGIN + 60.0 * (BEGINS + minute)
        known = [w for w in self.windows if w.end <= now]
        seen = [p for p in self.probes if p.at <= now] if probes else []
        return history(self.baseline, known, seen, now=known[-1].end)

    def names(self, minute: int, *, probes: bool = True) -> list[tuple[str, ...]]:
        """Causes of the alarms that stand, each with those that are not ruled out."""
        return [(a.cause, *a.or_else) for a in self.at(minute, probes=probes) if a.until is None]


def watched(faults: Faults, seed: int, *, minutes: int = 120) -> Watched:
    """A run of `minutes` after `BEGINS`, with its baseline and probes every ten minutes."""
    run = simulate(BEGINS + minutes, seed, faults)
    windows = windows_of(run.samples)
    baseline = Baseline.of(windows, WatchLimits())
    assert baseline is not None
    return Watched(run, windows, baseline, run.probes())
