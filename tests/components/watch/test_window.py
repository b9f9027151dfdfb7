"""Figures of windows, and how samples become windows."""

from __future__ import annotations

from typing import Any

import pytest

from draftwell.components.engines.remote.counters import Counters
from draftwell.components.watch.window import Window, equal_sized, merged, windows_of
from tests.support.watch.probes import probe


def counters(at: float, **changes: Any) -> Counters:
    sums: dict[str, Any] = {
        "requests": 10,
        "prompt_tokens": 2000,
        "cached_prompt_tokens": 500,
        "new_tokens": 1000,
        "rounds": 400,
        "drafted": 1600,
        "accepted": 600,
        "accepted_at": (300, 200, 100, 0),
        "started": 0.0,
        "version": "1",
    }
    return Counters(at=at, **(sums | changes))


def window(**changes: Any) -> Window:
    return Window(0.0, 60.0, counters(60.0, **changes))


def test_figures_of_a_window() -> None:
    found = window()
    assert found.length == 2.5
    assert found.accepted_at == (0.75, 0.5, 0.25, 0.0)
    assert found.drafted_per_token == 1.6
    assert found.wasted_per_token == 1.0
    assert found.hit_rate == 0.25
    assert found.prompt_length == 200


def test_nothing_drafted_is_no_length_of_one() -> None:
    quiet = window(rounds=0, drafted=0, accepted=0)
    assert quiet.length is None
    assert quiet.drafted_per_token == 0


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(10 * 0.02, 10), (1000 * 0.02, 400), (1000 * 0.02, 1000)],
    ids=["means of requests", "seconds of rounds", "seconds of tokens"],
)
def test_seconds_of_a_token_however_an_engine_adds_them_up(seconds: float, steps: int) -> None:
    found = window(decode_seconds=seconds, decode_steps=steps)
    assert found.seconds_per_token == pytest.approx(0.02)
    assert found.step_seconds == pytest.approx(0.05)
    assert found.at_once == pytest.approx(1000 * 0.02 / 60)


def test_a_round_takes_as_long_whatever_is_accepted() -> None:
    good = window(decode_seconds=400 * 0.05, decode_steps=400)
    bad = window(
        decode_seconds=800 * 0.05, decode_steps=800, rounds=800, drafted=3200, accepted=200
    )
    assert good.step_seconds == pytest.approx(bad.step_seconds)


def test_windows_with_a_plain_probe_of_the_engine_and_the_minute_after_are_marked() -> None:
    samples = [counters(60.0 * minute) for minute in range(5)]
    plain, drafting = (probe(at, "prose", 1.0, plain=at < 100) for at in (70.0, 190.0))
    found = windows_of(samples, [plain, drafting])
    assert [window.beside_probe for window in found] == [False, True, True, False]
    other = plain.model_copy(update={"elsewhere": True})
    assert not any(window.beside_probe for window in windows_of(samples, [other]))


def test_a_restart_and_falling_counters_leave_their_window_out() -> None:
    samples = [
        counters(60.0),
        counters(120.0, new_tokens=3000),
        counters(180.0, new_tokens=50, started=150.0),
        counters(240.0, new_tokens=80, started=150.0),
        counters(300.0, new_tokens=20, started=150.0),
    ]
    found = windows_of(samples)
    assert [w.new_tokens for w in found] == [2000, 30]
    assert found[-1].uptime == 90
    assert found[-1].falls == 0


def test_replicas_are_compared_each_with_itself() -> None:
    samples = []
    for i in range(6):
        here = i % 2
        total = 1000 * i + 50_000 * here
        samples.append(counters(60.0 * i, new_tokens=total, started=float(here)))
    found = windows_of(samples)
    assert [w.new_tokens for w in found] == [2000] * 4
    assert [w.seconds for w in found] == [120.0] * 4


def test_falls_are_counted_where_replicas_do_not_say_their_start() -> None:
    samples = [
        counters(60.0 * i, new_tokens=1000 * i + 50_000 * (i % 2), started=None) for i in range(10)
    ]
    assert windows_of(samples)[-1].falls == 4


def test_idle_minutes_are_merged_and_versions_are_not() -> None:
    idle = [Window(60.0 * i, 60.0 * (i + 1), counters(0, new_tokens=300)) for i in range(5)]
    other = Window(300.0, 360.0, counters(0, new_tokens=5000, version="2"))
    found = equal_sized([*idle, other], 1000)
    assert [(w.new_tokens, w.version) for w in found] == [(1200, "1"), (5000, "2")]
    assert (found[0].start, found[0].end) == (0.0, 240.0)


def test_merged_counts_are_sums_and_one_unknown_is_unknown() -> None:
    parts = [Window(0.0, 60.0, counters(60.0)), Window(60.0, 120.0, counters(120.0, drafted=None))]
    found = merged(parts)
    assert found.counts.accepted_at == (600, 400, 200, 0)
    assert found.counts.drafted is None
    assert found.length == 2.5
