"""Worker threads whose models compute on a CUDA device, with a device that only notes what it is
asked."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwell.components.calibrate.hardware_profile import synchronise
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.engine.workers import Workers, finish
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.resources import table_pair

CUDA = torch.device("cuda")


class Stream:
    """Notes in the device's list who waits for whom; on a lost device nobody can."""

    def __init__(self, name: str, notes: list[Any]):
        self.name, self.notes, self.device, self.lost = name, notes, CUDA, False

    def wait_stream(self, other: Stream) -> None:
        self.note("waits for", other.name)

    def synchronize(self) -> None:
        self.note("is waited for")

    def note(self, *words: str) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.notes.append((self.name, *words))


class Device:
    """`torch.cuda` as far as workers use it: a current stream for each thread, which is the default
    one until another is set."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.default, self.thread, self.made = Stream("default", self.notes), threading.local(), 0

    def Stream(self, device: torch.device) -> Stream:
        assert device == CUDA
        self.made += 1
        return Stream(f"worker {self.made}", self.notes)

    def set_stream(self, stream: Stream) -> None:
        self.thread.stream = stream

    def current_stream(self, device: torch.device | str) -> Stream:
        found: Stream = getattr(self.thread, "stream", self.default)
        return found


class Tensor:
    is_cuda = True

    def __init__(self) -> None:
        self.kept_for: list[str] = []

    def record_stream(self, stream: Stream) -> None:
        self.kept_for.append(stream.name)


class Whole:
    """Of a forward pass."""

    def __init__(self) -> None:
        self.values, self.hidden, self.support = Tensor(), None, Tensor()


class Model:
    """Computes by CUDA graphs, or not."""

    def __init__(self, device: Device, captures: bool = True):
        self.device, self.captures, self.waits, self.marks = (
            CUDA,
            captures,
            0,
            object() if captures else None,
        )
        self.where = device

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch, "cuda", made)
    return made


def test_models_with_graphs_have_a_stream_each_which_they_keep(device: Device) -> None:
    """On one stream, two models would compute in turn, however many threads launch them; a stream
    for each thread would use up all."""
    target, draft = Model(device), Model(device)
    streams = []
    for _ in range(2):
        both = Workers([target, draft])
        streams.append(
            [
                both.submit(one, lambda: device.current_stream(CUDA)).result()
                for one in (target, draft, target)
            ]
        )
        both.close()
    assert streams[0] == streams[1]
    assert streams[0][0] is streams[0][2]
    assert len({*streams[0], device.default}) == 3
    assert device.current_stream(CUDA) is device.default, "the caller's is as before"


def test_a_model_whose_memory_moves_launches_where_the_caller_does(device: Device) -> None:
    """Its caches are made anew on whichever stream is current: on two, one could be given memory
    that the other still reads."""
    eager = Model(device, captures=False)
    alone = Workers([eager])
    assert alone.submit(eager, lambda: device.current_stream(CUDA)).result() is device.default
    alone.close()
    assert (device.notes, device.made) == ([], 0)


def test_work_begins_behind_what_its_caller_launched_and_leaves_nothing_running(
    device: Device,
) -> None:
    one = Model(device)
    alone = Workers([one])

    def work(fails: bool) -> None:
        device.notes.append("work")
        if fails:
            raise ValueError

    for fails in (False, True):
        device.notes.clear()
        landed = alone.submit(one, work, fails)
        assert isinstance(landed.exception(), ValueError) is fails
        assert device.notes == [
            ("worker 1", "waits for", "default"),
            "work",
            ("worker 1", "is waited for"),
        ]
    alone.close()


def test_a_lost_device_is_what_the_work_says_it_is(device: Device) -> None:
    """The engine turns what a forward pass raises into an answer for its requests; what is raised
    around it would end all."""
    one = Model(device)
    alone = Workers([one])
    alone.submit(one, device.current_stream, CUDA).result().lost = True
    assert alone.submit(one, lambda: "the error, as a result").result() == "the error, as a result"
    alone.close()


def test_outputs_keep_their_memory_until_the_caller_has_read_them(device: Device) -> None:
    """The allocator would give it to a pass that runs meanwhile as soon as the caller lets go of
    it."""
    one, elsewhere = Model(device), Model(device, captures=False)
    made = [SimpleNamespace(whole=Whole()) for _ in range(3)]
    alone = Workers([one])
    alone.submit(one, finish, one, made[:1]).result()
    alone.close()
    finish(one, made[1:2])
    finish(elsewhere, made[2:])
    assert [(span.whole.values.kept_for, span.whole.support.kept_for) for span in made] == [
        (["default"], ["default"]),
        ([], []),
        ([], []),
    ]
    assert (one.waits, elsewhere.waits) == (2, 0)


def test_the_engine_finishes_every_pass_of_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[Any] = []
    monkeypatch.setattr(
        "draftwell.serving.runtime.engine.engine.finish",
        lambda model, outputs: finished.extend(outputs),
    )
    models = {role: model for role, model in table_pair().items() if role in ("target", "draft")}
    engine = Engine(models, split=True)
    stats = engine.generate(
        [1, 2], Sampling(max_tokens=8), build_strategy("vanilla_sd")
    ).session.stats
    engine.close()
    assert len(finished) >= stats.target_calls + stats.draft_calls > 0


def test_clocks_wait_for_the_calling_threads_stream_alone(device: Device) -> None:
    """The whole device's wait would charge a draft pass with the target's that runs beside it."""
    synchronise("cuda")
    synchronise("cpu")
    assert device.notes == [("default", "is waited for")]
