"""Planted silences in simulated time: each is named, in the documented time, and nothing else."""

from __future__ import annotations

import pytest

from draftwell.components.engines.remote.counters import Counters
from draftwell.components.watch.baseline import Baseline
from draftwell.components.watch.judge import judge
from draftwell.components.watch.schema import WatchLimits
from draftwell.components.watch.window import Window, windows_of
from tests.support.watch.simulator import BEGIN, Faults, simulate
from tests.support.watch.watched import BEGINS, watched

T = BEGINS
SILENCES = {
    "context grows from .2k to 4k in an hour": (Faults(context_from=T), "context_length", 90),
    "the draft becomes noise": (Faults(noise_from=T), "dead_draft", 12),
    "nothing is drafted": (Faults(silent_from=T), "dead_draft", 20),
    "traffic changes in an hour": (Faults(drift_from=T), "drift_of_traffic", 60),
    "all requests are sampled": (Faults(sampled_from=T), "drift_of_traffic", 75),
    "acceptance falls with uptime": (Faults(stale_from=T), "stale_draft", 90),
    "the prefix cache is off": (Faults(cache_from=T), "prefix_cache", 12),
    "a version is 10 % slower": (Faults(build_from=T), "build_change", 90),
    "load grows from 1 to 32 in an hour": (Faults(load_from=T), "load_crossover", 120),
}
"""Silence → faults, its cause, and minutes until it must be named (docs/watchdog_judgement.md)."""


def named(name: str, seed: int) -> bool:
    """Whether the silence is the only alarm when its time is over; no other cause is ever named."""
    faults, cause, minutes = SILENCES[name]
    found = watched(faults, seed, minutes=minutes)
    for minute in (*range(5, minutes, 10), minutes):
        for alarm in found.names(minute):
            assert cause in alarm, (name, seed, minute)
    return found.names(minutes) == [(cause,)]


def test_a_restart_without_speculation_is_no_loss_of_metrics() -> None:
    """vLLM has no series of drafts then."""
    found = watched(Faults(restarts=(T,)), 1, minutes=30)
    silent = {"rounds": None, "drafted": None, "accepted": None, "accepted_at": ()}
    samples = found.run.samples
    mute = [*samples[:T], *(one.model_copy(update=silent) for one in samples[T:])]
    alarms = judge(found.baseline, windows_of(mute))
    assert [alarm.cause for alarm in alarms] == ["dead_draft"]


@pytest.mark.parametrize("name", SILENCES)
def test_a_silence_is_named_and_nothing_else(name: str) -> None:
    assert named(name, 1)


@pytest.mark.slow  # 54 simulated runs
@pytest.mark.parametrize("name", SILENCES)
def test_a_silence_is_named_in_six_worlds(name: str) -> None:
    missed = [seed for seed in range(10, 16) if not named(name, seed)]
    # in world 14 the load leaves what the baseline has seen, and rounds cannot be compared
    assert missed == ([14] if name == "a version is 10 % slower" else [])


def test_two_silences_at_once_are_two_alarms() -> None:
    found = watched(Faults(noise_from=T, cache_from=T + 10), 3, minutes=40)
    assert sorted(found.names(40)) == [("dead_draft",), ("prefix_cache",)]


def test_hits_that_are_counted_later_than_prompts_hide_no_cache_that_is_off() -> None:
    """A server adds prompts when they are read, and hits when requests end: with three requests a
    window, the share of some windows is beyond 1, and of others a third of the mean."""

    def window(minute: int, cached: int) -> Window:
        read, at = (1, 5, 2, 4, 3, 1, 5)[minute % 7], 60.0 * minute
        added = {"requests": 3, "prompt_tokens": 200 * read, "cached_prompt_tokens": 3 * cached}
        counts = Counters(at=at + 60, new_tokens=72, started=0.0, version="1", **added)
        return Window(at, at + 60, counts, 0.0)

    limits = WatchLimits(warm_up_seconds=0)
    baseline = Baseline.of([window(i, 160) for i in range(120)], limits)
    well = [window(i, 160) for i in range(120, 220)]
    off = [window(i, 0) for i in range(220, 232)]
    assert judge(baseline, well, limits=limits) == []
    assert [alarm.cause for alarm in judge(baseline, well + off, limits=limits)] == ["prefix_cache"]


def test_a_slower_version_is_not_blamed_for_traffic_that_changes_later() -> None:
    found = watched(Faults(build_from=T, drift_from=T + 75), 4, minutes=150)
    raised = {(alarm.cause, alarm.or_else) for alarm in found.at(150)}
    assert raised == {("build_change", ()), ("drift_of_traffic", ())}


def test_without_probes_both_causes_are_said_and_what_would_tell() -> None:
    drift = watched(Faults(drift_from=T), 5, minutes=60)
    assert drift.names(60, probes=False) == [("drift_of_traffic", "stale_draft")]
    (alarm,) = drift.at(60, probes=False)
    assert "fixed prompts" in alarm.to_tell
    assert not drift.at(60)[0].to_tell
    noise = watched(Faults(noise_from=T), 5, minutes=15)
    assert noise.names(15, probes=False) == [("dead_draft",)]


def test_a_restart_that_helps_says_that_the_draft_was_stale() -> None:
    found = watched(Faults(stale_from=T, stale_rate=0.5, restarts=(T + 90,)), 6, minutes=130)
    assert found.names(80, probes=False) == [("drift_of_traffic", "stale_draft")]
    stale = [alarm for alarm in found.at(130, probes=False) if alarm.cause == "stale_draft"]
    assert stale
    assert not stale[0].or_else


def test_a_slow_recovery_ends_the_alarm_and_raises_no_other() -> None:
    faults = Faults(drift_from=T, drift_minutes=30, recovers_from=T + 60)
    (alarm,) = watched(faults, 7, minutes=150).at(150)
    assert alarm.cause == "drift_of_traffic"
    assert alarm.until is not None
    assert alarm.until > BEGIN + 60 * (T + 60)


def test_a_silence_during_idle_minutes_is_named_when_requests_come() -> None:
    faults = Faults(noise_from=T, idle_from=T - 5, idle_minutes=60)
    found = watched(faults, 8, minutes=70)
    assert found.at(50) == []
    assert found.names(70) == [("dead_draft",)]


def test_a_gap_of_an_hour_is_lost_metrics_and_hides_no_silence() -> None:
    found = watched(Faults(gap_from=T, noise_from=T + 30), 9, minutes=80)
    before = [w for w in found.windows if w.end <= BEGIN + 60 * T]
    (lost,) = judge(found.baseline, before, [], now=BEGIN + 60 * (T + 20))
    assert lost.cause == "metrics_lost"
    assert found.names(80) == [("dead_draft",)]
    healthy = watched(Faults(gap_from=T), 9, minutes=120)
    assert healthy.at(120) == []


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_behind_one_address_are_compared_each_with_itself(replicas: int) -> None:
    assert watched(Faults(replicas=replicas), 10).at(120) == []
    found = watched(Faults(replicas=replicas, noise_from=T), 10, minutes=30)
    assert found.names(30) == [("dead_draft",)]


def test_replicas_that_do_not_say_their_start_are_lost_metrics() -> None:
    windows = windows_of(simulate(200, 11, Faults(replicas=3, says_start=False)).samples)
    assert Baseline.of(windows, WatchLimits()) is None
    (alarm,) = judge(None, windows)
    assert alarm.cause == "metrics_lost"
    assert "replicas" in alarm.evidence[0].words


@pytest.mark.parametrize("seed", [12, 13])
def test_a_neighbour_is_the_machine_and_passes(seed: int) -> None:
    alarms = watched(Faults(neighbour_from=T), seed, minutes=60).at(60)
    assert {alarm.cause for alarm in alarms} <= {"machine"}
    assert all(alarm.until is not None for alarm in alarms)
