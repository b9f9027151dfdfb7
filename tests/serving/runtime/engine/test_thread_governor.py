"""Threads follow the cores that other processes leave: decisions from planted readings, and the
engine that asks for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftwell.serving.runtime.engine import thread_governor
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.engine.thread_governor import (
    CALM,
    WINDOW,
    CoreTimes,
    ThreadGovernor,
    core_times,
    governor_for,
    next_threads,
)
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.resources import table_pair, table_resources
from tests.support.models.table_model import TableModel


class Torch:
    """Stands in for torch's threads of one thread."""

    def __init__(self, threads: int):
        self.threads, self.changes = threads, list[int]()

    def get_num_threads(self) -> int:
        return self.threads

    def set_num_threads(self, threads: int) -> None:
        self.threads = threads
        self.changes.append(threads)


class Machine:
    """A clock that stands still, and cores that others use as planted."""

    def __init__(self, cores: int, monkeypatch: pytest.MonkeyPatch):
        self.cores, self.now, self.unused, self.own, self.readings = cores, 0.0, 0.0, 0.0, 0
        self.torch = Torch(cores)
        monkeypatch.setattr(thread_governor, "torch", self.torch)
        self.governor = ThreadGovernor(cores, self.read, lambda: self.now)

    def read(self) -> CoreTimes:
        self.readings += 1
        return CoreTimes(self.now, self.unused, self.own)

    def runs(self, others: float, seconds: float = WINDOW, own: float = 1.0) -> int:
        """Threads after others used so many cores for a while, and we `own` of the rest."""
        self.now += seconds
        self.own += own * seconds
        self.unused += (self.cores - others - own) * seconds
        self.governor.check()
        return self.torch.threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(2, monkeypatch)


def test_a_core_that_another_process_takes_is_given_up_at_the_next_reading(
    machine: Machine,
) -> None:
    assert [machine.runs(0.05), machine.runs(0.6), machine.runs(1.0)] == [2, 1, 1]


def test_two_busy_threads_elsewhere_leave_one_of_ours(machine: Machine) -> None:
    assert [machine.runs(1.3), machine.runs(1.5), machine.runs(2.0)] == [1, 1, 1]


def test_an_idle_machine_never_changes_whatever_we_do_ourselves(machine: Machine) -> None:
    for own in (2.0, 0.0, 1.1, 1.9, 0.3) * 20:
        machine.runs(others=0.1, own=own)
    assert machine.torch.changes == []


def test_a_core_that_is_free_again_is_taken_after_some_calm_seconds(machine: Machine) -> None:
    machine.runs(1.0)
    after = [machine.runs(0.0) for _ in range(CALM)]
    assert after == [1] * (CALM - 1) + [2]
    assert CALM * WINDOW <= 5


def test_what_others_did_while_nothing_was_decoded_does_not_count(machine: Machine) -> None:
    """A server without requests, or one that was stopped: the first answer after it computes on all
    cores, and gives one up if need be."""
    assert machine.runs(1.9, seconds=60, own=0.01) == 2
    assert machine.runs(1.0) == 1


def test_a_long_step_counts(machine: Machine) -> None:
    assert machine.runs(1.0, seconds=10) == 1


def test_one_busy_window_begins_the_calm_anew(machine: Machine) -> None:
    machine.runs(1.0)
    for _ in range(CALM - 1):
        machine.runs(0.0)
    assert machine.runs(0.5) == 1
    assert [machine.runs(0.0) for _ in range(CALM)][-2:] == [1, 2]


@pytest.mark.parametrize("wanted", [0.1, 0.16, 0.2, 0.22, 0.25, 0.28, 0.5, 1.0])
def test_a_steady_process_changes_the_threads_once_at_most(machine: Machine, wanted: float) -> None:
    """It gets less where we compute with both cores than where we leave it one."""
    for turn in range(200):
        noise = 0.03 * (-1) ** turn
        machine.runs((wanted if machine.torch.threads == 1 else wanted * 0.9) + noise)
    assert len(machine.torch.changes) <= 1


def test_one_that_comes_and_goes_every_second_is_not_followed(machine: Machine) -> None:
    for _ in range(50):
        machine.runs(1.0)
        machine.runs(0.0)
    assert machine.torch.changes == [1]


def test_of_many_cores_only_those_that_are_taken_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(8, monkeypatch)
    assert [machine.runs(0.2, own=7), machine.runs(2.0, own=6), machine.runs(2.2, own=5)] == [
        8,
        6,
        6,
    ]
    assert [machine.runs(1.1, own=6) for _ in range(CALM)][-1] == 7
    quota = ThreadGovernor(2, machine.read, lambda: machine.now)
    machine.now, machine.unused = machine.now + 1, machine.unused + 2.5
    quota.check()
    assert quota.threads == 2, "the quota pays for two threads, and that many cores are free"


def test_a_long_wait_for_requests_is_one_reading(machine: Machine) -> None:
    machine.runs(0.0, seconds=3600, own=0)
    assert [machine.runs(1.0), machine.readings] == [1, 3]


def test_between_readings_a_check_reads_nothing(machine: Machine) -> None:
    before = machine.readings
    for _ in range(100):
        machine.runs(1.0, seconds=WINDOW / 1000)
    assert machine.readings == before


def test_every_thread_that_steps_computes_with_the_threads_in_force(machine: Machine) -> None:
    machine.runs(1.0)
    machine.torch.threads = 2  # as another thread of this process has them
    machine.governor.check()
    assert machine.torch.threads == 1
    with machine.governor:
        machine.governor.check()
    assert machine.torch.threads == 2, "afterwards all of them"


def test_a_system_that_tells_nothing_and_a_single_thread_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch, now = Torch(4), iter(range(100))
    monkeypatch.setattr(thread_governor, "torch", torch)
    silent = ThreadGovernor(4, lambda: None, lambda: next(now))

    def unwanted() -> CoreTimes:
        raise AssertionError("nothing can change, so nothing is read")

    single = ThreadGovernor(1, unwanted, lambda: next(now))
    for _ in range(20):
        silent.check()
        single.check()
    assert torch.changes == []


def test_only_threads_that_nobody_named_are_governed() -> None:
    assert governor_for(2, "cpu") is None
    assert governor_for(None, "cuda:0") is None
    assert isinstance(governor_for(None, "cpu"), ThreadGovernor)


def test_the_decision_never_leaves_its_bounds() -> None:
    for most in (1, 2, 5):
        for threads in range(1, most + 1):
            for free in ([-0.2] * CALM, [0.0] * CALM, [99.0] * CALM, [2.0], [0.1]):
                assert 1 <= next_threads(threads, most, free) <= most


STAT = """cpu  70 0 30 400 50 0 0 40 0 0
cpu0 10 5 10 100 20 1 1 10 0 0
cpu1 10 5 10 200 10 1 1 20 0 0
cpu3 50 0 10 100 20 1 1 10 0 0
intr 1 2 3
"""


@pytest.mark.parametrize(("cores", "unused"), [([0, 3], 2.6), ([1], 2.3), ([0, 2], None)])
def test_the_cores_of_this_process_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: list[int], unused: float
) -> None:
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(thread_governor, "STAT", tmp_path / "stat")
    monkeypatch.setattr(thread_governor, "core_ids", lambda: cores)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    found = core_times()
    assert (found.unused if found else None) == (pytest.approx(unused) if unused else None)
    monkeypatch.setattr(thread_governor, "STAT", tmp_path / "missing")
    assert core_times() is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_real_reading_counts_what_this_process_used() -> None:
    code = (
        "from draftwell.serving.runtime.engine.thread_governor import core_times as t; a = t(); "
        "sum(range(3_000_000)); b = t()\n"
        "print(0 < b.own - a.own < 60 and b.clock > a.clock and b.unused >= a.unused)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "True"
    )


class Asked:
    """A governor that notes when it is asked."""

    def __init__(self) -> None:
        self.checks = 0

    def check(self) -> None:
        self.checks += 1


def steps_of(engine: Engine, name: str, **parameters: Any) -> Iterator[Sequence[int]]:
    job = engine.submit(
        [1], Sampling(max_tokens=6), build_strategy(name, parameters, table_resources(5, ratio=4.0))
    )
    while not job.finished:
        engine.step()
        yield job.output


def test_the_engine_asks_before_every_step() -> None:
    asked: Any = Asked()
    steps = len(
        list(
            steps_of(
                Engine({"target": TableModel.random(vocab_size=5, seed=0)}, governor=asked),
                "autoregressive",
            )
        )
    )
    assert asked.checks == steps >= 6


def test_while_models_overlap_their_threads_are_left_alone() -> None:
    asked: Any = Asked()
    list(
        steps_of(
            Engine(table_pair(vocab=5, noise=0.0), governor=asked), "spide", tau=0.5, max_draft=4
        )
    )
    assert asked.checks == 1, "before the workers began"
