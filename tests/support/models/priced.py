"""Models whose forward passes take a known time on a clock that only they move: timings become
exact and need no idle machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from draftwell.serving.runtime.commands import Forward

Price = Callable[[Forward, int], float]
"""(command, tokens in its slot before) → seconds."""


class Clock(threading.local):
    """Takes the place of the module `time`; each thread has a time of its own, so that passes of
    models that run at once do not count for each other."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Priced:
    """A table model that moves the clock by the price of each forward pass."""

    def __init__(self, model: Any, clock: Clock, price: Price):
        self.model, self.clock, self.price = model, clock, price

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, rows: list[Forward]) -> Any:
        self.clock.now += sum(self.price(row, self.model.slots.lengths[row.slot]) for row in rows)
        return self.model.forward(rows)


class Flight:
    """Work that is over at `end`: the clock is there for whoever takes its result."""

    def __init__(self, clock: Clock, result: Any, end: float):
        self.clock, self.end, self._result = clock, end, result

    def done(self) -> bool:
        return self.end <= self.clock.now

    def result(self) -> Any:
        self.clock.now = max(self.clock.now, self.end)
        return self._result


class PricedWorkers:
    """In the place of `Workers`: models run at once on the clock, and in turn on one thread."""

    def __init__(self, clock: Clock, models: Sequence[Any]):
        self.clock, self.busy = clock, dict.fromkeys(map(id, models), 0.0)

    def submit(self, model: Any, work: Callable[..., Any], *arguments: Any) -> Flight:
        asked = self.clock.now
        self.clock.now = max(asked, self.busy[id(model)])
        result, self.busy[id(model)] = work(*arguments), self.clock.now
        self.clock.now = asked
        return Flight(self.clock, result, self.busy[id(model)])

    def close(self) -> None:
        """What is in flight ends first."""
        self.clock.now = max(self.clock.now, *self.busy.values())


def wait_for_first(flights: Iterable[Flight], **_: Any) -> None:
    """In the place of `concurrent.futures.wait`."""
    min(flights, key=lambda flight: flight.end).result()
