"""Overlapping sides really run at once, on threads of their own, and nothing of that shows in a
result."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import wait

import pytest
import torch

from draftwell.serving.device import usable_cores
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.engine.workers import shares
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.asking import submit
from tests.support.models.resources import table_pair, table_resources
from tests.support.models.table_model import TableModel

TARGET_SECONDS, DRAFT_SECONDS = 0.02, 0.004


class Slow:
    """A model that takes its time, and notes on which threads and cores it ran."""

    def __init__(self, model: TableModel, seconds: float):
        self.model, self.seconds, self.threads, self.cores = model, seconds, set(), set()

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, rows):
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread().name)
        self.cores.add(tuple(sorted(os.sched_getaffinity(0))))
        return self.model.forward(rows)


def slow_pair(times: float = 1) -> dict:
    """A draft that is always right, a target five times slower."""
    models = table_pair(vocab=5, noise=0.0)
    return {
        "target": Slow(models["target"], times * TARGET_SECONDS),
        "draft": Slow(models["draft"], times * DRAFT_SECONDS),
    }


def parallel_spide():
    return build_strategy("spide", {"tau": 0.5, "max_draft": 4}, table_resources(5, ratio=4.0))


def spans(timeline, role):
    return [(start, end) for name, start, end in timeline if name == role]


def overlapped(stats) -> int:
    """Target forwards during which at least three draft forwards began."""
    begun = [start for start, _ in spans(stats.timeline, "draft")]
    return sum(
        sum(start < at < end for at in begun) >= 3 for start, end in spans(stats.timeline, "target")
    )


def test_the_draft_goes_on_while_the_target_verifies():
    """Slowly enough for a busy machine, which wakes a thread some milliseconds late."""
    at_once, in_turn = (
        Engine(slow_pair(times=10), split=split)
        .generate([1], Sampling(max_tokens=30), parallel_spide())
        .session.stats
        for split in (None, False)
    )
    assert overlapped(at_once) >= 3
    assert overlapped(in_turn) == 0
    assert len(at_once.overlap_seconds) == len(in_turn.overlap_seconds) >= 3


def test_an_overlap_is_measured_by_its_longer_side():
    assert Stats(overlap_seconds=[(1.1, 1.0), (2.2, 2.0)]).overlap_stretch == pytest.approx(1.1)
    assert Stats().overlap_stretch is None


def test_sides_in_turn_and_at_once_give_the_same_tokens_and_counters():
    results = []
    for split in (False, None):
        job = Engine(slow_pair(), split=split).generate(
            [1], Sampling(max_tokens=20, temperature=1.0, seed=3), parallel_spide()
        )
        s = job.session.stats
        results.append((job.output, s.drafted, s.judged, s.accepted, s.target_calls, s.draft_calls))
    assert results[0] == results[1]


def test_each_model_has_a_thread_and_cores_of_its_own_and_serial_requests_have_none():
    models = slow_pair()
    Engine(models).generate([1], Sampling(max_tokens=12), parallel_spide())
    assert all(len(m.threads) == 1 for m in models.values())
    assert models["target"].threads.isdisjoint(models["draft"].threads)
    assert "MainThread" not in models["target"].threads | models["draft"].threads
    if usable_cores() > 1:
        assert set(*models["target"].cores).isdisjoint(set(*models["draft"].cores))
    serial = slow_pair()
    Engine(serial).generate([1], Sampling(max_tokens=4), build_strategy("vanilla_sd"))
    assert serial["target"].threads == {"MainThread"}


def test_a_serial_strategy_can_be_held_to_the_same_cores():
    models = slow_pair()
    Engine(models, split=True).generate([1], Sampling(max_tokens=4), build_strategy("vanilla_sd"))
    assert "MainThread" not in models["target"].threads


def test_threads_end_with_the_last_request_and_torch_computes_as_before():
    threads, running = torch.get_num_threads(), set(threading.enumerate())
    Engine(slow_pair()).generate([1], Sampling(max_tokens=8), parallel_spide())
    assert torch.get_num_threads() == threads
    assert set(threading.enumerate()) <= running


def test_a_request_cancelled_in_flight_gives_back_its_slots_when_the_forward_is_over():
    models = slow_pair()
    engine = Engine(models)
    job, other = (submit(engine, [1], 30, parallel_spide(), seed=s) for s in (1, 2))
    for _ in range(6):
        engine.step()
    engine.cancel(job)
    assert not any(mine is job for flight in engine._flights for mine, _ in flight.group)
    assert len(models["target"].slots._free) == len(models["target"].slots.lengths) - 1
    engine.run([other])
    alone = Engine(slow_pair()).generate([1], Sampling(max_tokens=30, seed=2), parallel_spide())
    assert other.output == alone.output


def test_an_error_on_one_side_ends_the_request_and_spares_the_others():
    models = slow_pair()
    engine = Engine(models)
    good = submit(engine, [1], 10)
    bad = submit(engine, [1], 10, parallel_spide())

    def broken(rows):
        raise RuntimeError("the draft broke")

    models["draft"].forward = broken
    engine.run([good])
    with pytest.raises(RuntimeError, match="the draft broke"):
        engine.run([bad])
    assert len(good.output) == 10
    assert not engine.jobs


@pytest.mark.parametrize(
    ("cores", "parts", "expected"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1, 2], 2, [[0, 1], [2]]),
        ([4], 2, [[4], [4]]),
        ([1, 3, 5, 7], 1, [[1, 3, 5, 7]]),
    ],
)
def test_cores_are_shared_without_overlap(cores, parts, expected):
    assert shares(cores, parts) == expected


TEAMS = """
import time

import psutil
import torch

from draftwell.serving.runtime.engine.workers import on_own_thread

torch.set_num_threads(2)
compute = lambda: torch.ones(1 << 20).exp_()
threads = psutil.Process().num_threads
before = threads()
assert on_own_thread(compute).shape == (1 << 20,)
until = time.monotonic() + 20
while threads() > before and time.monotonic() < until:  # a thread's team ends a moment after it
    time.sleep(0.05)
print(threads() - before)
compute()
print(threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other OpenMP libraries")
def test_what_is_computed_apart_leaves_no_team_of_threads_behind():
    """Every team that is left makes all others slow: the second figure is what `on_own_thread` is
    for."""
    done = subprocess.run([sys.executable, "-c", TEAMS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]


def test_what_fails_apart_fails_here():
    from draftwell.serving.runtime.engine.workers import on_own_thread

    with pytest.raises(ZeroDivisionError):
        on_own_thread(divmod, 1, 0)


class Held:
    """A model whose forward passes wait until it is let go."""

    def __init__(self, model: TableModel):
        self.model, self.free, self.calls = model, threading.Event(), 0
        self.free.set()

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, rows):
        self.calls += 1
        assert self.free.wait(60)
        return self.model.forward(rows)


@pytest.mark.parametrize("split", [False, None], ids=["load control forbids it", "nobody overlaps"])
def test_under_load_nothing_begins_until_cores_are_joined(monkeypatch, split):
    """One request drafts while another's verification is in flight, and so on for as long as load
    lasts: no idle moment comes by itself."""
    models = {role: Held(model) for role, model in table_pair(vocab=5).items()}
    engine = Engine(models, split=True)
    jobs = [
        submit(engine, [1], 30, build_strategy("vanilla_sd", {"num_speculative_tokens": n}))
        for n in (1, 6)
    ]
    engine.step()  # the prompts
    models["target"].free.clear()
    while not engine._flights:
        engine.step()
    assert [flight.model for flight in engine._flights] == [models["target"]]
    engine.split, begun = split, models["draft"].calls

    def let_go(futures, **how):
        models["target"].free.set()
        return wait(futures, **how)

    monkeypatch.setattr("draftwell.serving.runtime.engine.engine.wait", let_go)
    engine.step()
    assert models["draft"].calls == begun
    assert not engine._flights
    engine.step()
    assert engine._workers is None
    assert not any(job.finished for job in jobs)
    engine.run(jobs)
    alone = Engine(table_pair(vocab=5)).generate(
        [1], Sampling(max_tokens=30), build_strategy("autoregressive")
    )
    assert [job.output for job in jobs] == [alone.output] * 2


def test_cores_are_joined_when_the_last_overlapping_request_has_ended_though_others_go_on():
    engine = Engine(table_pair(vocab=5))
    others = [
        submit(engine, [1], 300, build_strategy("vanilla_sd", {"num_speculative_tokens": n}))
        for n in (1, 6)
    ]
    first = submit(engine, [1], 6, parallel_spide())
    engine.step()
    assert engine._workers is not None
    engine.run([first])
    for _ in range(3):  # at most two passes are in flight
        engine.step()
    assert engine._workers is None
    assert not any(job.finished for job in others)
    engine.run(others)
