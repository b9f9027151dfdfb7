"""A tuning that is killed with SIGKILL, again and again, chooses what an unbroken one does, and
replays and measures little twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.components.tune.search import search
from tests.components.tune.killed_tuner import PROMPTS, run
from tests.support.collecting import collect_traces
from tests.support.killing import child
from tests.support.loop.scripted_clock import Clock
from tests.support.models.tiny import table_pair

SPEEDS = {"vanilla_sd": 1.3}


@pytest.mark.slow
def test_killed_while_it_searches_and_while_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, whole, broken = (tmp_path / name for name in ("trace", "whole", "broken"))
    collect_traces(table_pair(), PROMPTS, trace, max_tokens=12, rollout=8, batch=4)
    real, replays = search.replay_strategy, list[tuple[Any, ...]]()
    monkeypatch.setattr(
        search,
        "replay_strategy",
        lambda *given, **more: replays.append(given) or real(*given, **more),
    )
    unbroken = Clock(SPEEDS)
    expected, needed = run(trace, whole, unbroken), len(replays)
    replays.clear()
    broken.mkdir()
    for point, number in (("replay", 5), ("trials", 3), ("rungs", 2)):
        done = child("tests.components.tune.killed_tuner", trace, broken, point, number)
        assert done.returncode != 0
    clock = Clock(SPEEDS)
    found = run(trace, broken, clock)
    assert found.choice == expected.choice
    assert found.reason == expected.reason
    assert found.choice.name == "vanilla_sd"
    assert found.trials == expected.trials
    assert needed == len(expected.trials) + 1, "plain decoding is a reference, and never on disk"
    assert len(replays) == 1, (
        "all trials were replayed before: the third process died when it measured"
    )
    assert len(clock.calls) == len(unbroken.calls) - 1, (
        "the first measurement was kept, the second died in the middle of its line"
    )
