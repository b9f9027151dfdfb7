"""Times of models that do not wait for their device: read once, when a request is over; a device
with a clock stands in."""

from __future__ import annotations

import time
from itertools import pairwise

from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.cuda.cuda_graph import Marks, read_marks
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.resources import table_pair

WORK = 0.004


class Device:
    """Runs what is launched, one after another: `free` is when it has done all."""

    def __init__(self):
        self.free, self.waits = 0.0, 0

    def launch(self, seconds: float) -> None:
        self.free = max(self.free, time.perf_counter()) + seconds

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self.device = device

    def record(self) -> None:
        self.at = max(self.device.free, time.perf_counter())

    def synchronize(self) -> None:
        self.device.waits += 1
        time.sleep(max(0.0, self.at - time.perf_counter()))

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1000


class Launching:
    """A table model on such a device."""

    def __init__(self, model, device: Device):
        self.model, self.at, self.waits = model, device, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, rows):
        marks = Marks(self.at.event)
        self.at.launch(WORK)
        self.marks = marks.end()
        return self.model.forward(rows)

    def synchronize(self) -> None:
        self.waits += 1
        time.sleep(max(0.0, self.at.free - time.perf_counter()))


def run(split: bool | None = None):
    device = Device()
    models = {
        role: Launching(model, device)
        for role, model in table_pair().items()
        if role in ("target", "draft")
    }
    engine = Engine(models, split=split)
    job = engine.generate([1, 2], Sampling(max_tokens=8), build_strategy("vanilla_sd"))
    engine.close()
    return device, models, job.session.stats


def test_events_are_read_once_at_the_end_and_give_the_devices_times():
    device, models, stats = run()
    assert device.waits == 1
    assert sum(model.waits for model in models.values()) == 0
    assert len(stats.timeline) == stats.target_calls + stats.prefill_calls + stats.draft_calls
    assert all(end - start >= WORK * 0.9 for _, start, end in stats.timeline)
    assert all(start >= end - WORK * 0.1 for (_, _, end), (_, start, _) in pairwise(stats.timeline))
    assert stats.busy_seconds >= len(stats.timeline) * WORK * 0.9


def test_on_a_thread_of_its_own_a_model_waits_for_its_device():
    device, models, stats = run(split=True)
    assert device.waits == 0
    assert all(model.waits > 0 for model in models.values())
    assert all(end - start >= WORK * 0.9 for _, start, end in stats.timeline)


def test_marks_are_placed_on_the_hosts_clock():
    device = Device()
    begun = time.perf_counter()
    marks = Marks(device.event)
    device.launch(WORK)
    [(start, end)] = read_marks([marks.end()])
    assert start >= begun - WORK * 0.1
    assert end - start > WORK * 0.9
    assert read_marks([]) == []
