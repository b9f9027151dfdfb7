"""Models whose forward passes take a known time on a clock that only they move: timings become
exact and need no idle machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftwell.serving.runtime.commands import Forward

Price = Callable[[Forward, int], float]
"""(command, tokens in its slot before) → seconds."""


class Clock:
    """Takes the place of the module `time`."""

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
