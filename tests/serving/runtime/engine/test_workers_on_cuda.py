"""Worker threads whose models compute on a CUDA device, with a device that only notes what it is asked."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serving.runtime.engine import workers
from serving.runtime.engine.workers import Workers, lend

CUDA = torch.device("cuda")


class Stream:
    """Notes in the device's list who waits for whom."""

    def __init__(self, name: str, notes: list[Any]):
        self.name, self.notes, self.device = name, notes, CUDA

    def wait_stream(self, other: Stream) -> None:
        self.notes.append((self.name, "waits for", other.name))

    def synchronize(self) -> None:
        self.notes.append((self.name, "is waited for"))


class Device:
    """`torch.cuda` as far as workers use it: a current stream for each thread, which is the default one until another is set."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.default, self.thread, self.made = Stream("default", self.notes), threading.local(), 0

    def Stream(self, device: torch.device) -> Stream:
        assert device == CUDA
        self.made += 1
        return Stream(f"worker {self.made}", self.notes)

    def set_stream(self, stream: Stream) -> None:
        self.thread.stream = stream

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self.thread, "stream", self.default)


class Tensor:
    is_cuda = True

    def __init__(self) -> None:
        self.kept_for: list[str] = []

    def record_stream(self, stream: Stream) -> None:
        self.kept_for.append(stream.name)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(workers.torch, "cuda", made)
    return made


def model(where: str = "cuda") -> Any:
    return SimpleNamespace(device=torch.device(where))


def test_models_on_one_device_have_a_stream_each(device: Device) -> None:
    """On one stream, two models would compute in turn, however many threads launch them."""
    target, draft = model(), model()
    both = Workers([target, draft])
    streams = [both.submit(one, lambda: device.current_stream(CUDA)).result() for one in (target, draft, target)]
    both.close()
    assert streams[0] is streams[2]
    assert len({streams[0], streams[1], device.default}) == 3
    assert device.current_stream(CUDA) is device.default, "the caller's is as before"


def test_work_begins_behind_what_its_caller_launched_and_is_waited_for_even_if_it_fails(device: Device) -> None:
    one = model()
    alone = Workers([one])

    def work(fails: bool) -> None:
        device.notes.append("work")
        if fails:
            raise ValueError

    for fails in (False, True):
        device.notes.clear()
        landed = alone.submit(one, work, fails)
        assert isinstance(landed.exception(), ValueError) is fails
        assert device.notes == [("worker 1", "waits for", "default"), "work", ("worker 1", "is waited for")]
    alone.close()


def test_what_comes_out_keeps_its_memory_until_the_caller_has_read_it(device: Device) -> None:
    """The allocator would give it to the next forward pass of the worker's stream as soon as the caller lets go of it."""
    one, logits, elsewhere = model(), Tensor(), Tensor()
    alone = Workers([one])
    alone.submit(one, lend, [logits, None]).result()
    alone.close()
    lend([elsewhere])
    assert logits.kept_for == ["default"]
    assert elsewhere.kept_for == [], "the caller's own stream needs no such thing"


def test_a_model_on_the_cpu_asks_nothing_of_a_device(device: Device) -> None:
    one = model("cpu")
    alone = Workers([one])
    assert alone.submit(one, lambda: "done").result() == "done"
    alone.close()
    assert (device.notes, device.made) == ([], 0)
