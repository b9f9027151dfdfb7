"""Ten quiet hours, with a day's load, bursts, idle minutes, a wandering mixture and a restart."""

from __future__ import annotations

import pytest

from draftwell.components.watch.baseline import Baseline
from draftwell.components.watch.judge import history
from draftwell.components.watch.schema import WatchLimits
from draftwell.components.watch.window import windows_of
from tests.support.watch.simulator import Faults, simulate

BASELINE_MINUTES, HOURS = 130, 10


def false_alarms(seeds: range) -> list[tuple[int, str]]:
    """Seeds and causes of all alarms that were ever raised."""
    found: list[tuple[int, str]] = []
    for seed in seeds:
        minutes = BASELINE_MINUTES + 60 * HOURS
        windows = windows_of(simulate(minutes, seed, Faults(restarts=(400,))).samples)
        baseline = Baseline.of(windows, WatchLimits())
        assert baseline is not None
        found += [(seed, alarm.cause) for alarm in history(baseline, windows)]
    return found


def test_ten_quiet_hours_raise_no_alarm() -> None:
    assert false_alarms(range(1000, 1004)) == []


def test_an_early_upgrade_still_leaves_a_baseline() -> None:
    """It is of the version with enough quiet windows."""
    run = simulate(220, 1, Faults(build_from=50))
    found = Baseline.of(windows_of(run.samples), WatchLimits())
    assert found is not None
    assert found.version == run.samples[-1].version != run.samples[0].version


@pytest.mark.slow  # a hundred times ten hours
def test_quiet_hours_raise_hardly_any_alarm() -> None:
    found = false_alarms(range(2000, 2100))
    # 42 days: `quiet_days` of 30 permits 1.4 on average
    assert len(found) <= 1, found
