"""Emulated devices: a model computes its real outputs, and its pass ends when the curve says.

Every pass begins when the engine starts it and ends at a deadline: the curve's time, stretched by
one factor that is the same for all passes, so that real work ends before it. Whoever reads a clock
divides by that factor. A pass that is not over at its deadline is late, and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from draftwell.components.emulation.curve import Curve
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.pair import LoadedPair

SLACK = 0.02
"""Share of its time by which a pass may end behind its deadline: a thread that slept is woken up
tens of microseconds too late."""
EMULATED: tuple[Role, ...] = ("target", "draft")


class Pass(NamedTuple):
    """A pass that was emulated.

    Args:
        time: by the curve, in its unit; None: it did not wait.
        worked, took: real seconds of computing, and until it ended.
        stretch: in force.
    """

    role: Role
    time: float | None
    worked: float
    took: float
    stretch: float | None

    @property
    def due(self) -> float:
        """Real seconds until its deadline; 0: it has none."""
        return (self.time or 0.0) * (self.stretch or 0.0)

    @property
    def waited(self) -> bool:
        """Whether it had to wait for its deadline."""
        return self.worked < self.due

    @property
    def delay(self) -> float:
        """Real seconds by which it ended behind its deadline."""
        return self.took - self.due

    @property
    def late(self) -> bool:
        """Whether it ended behind its deadline, but for `SLACK`."""
        return self.due > 0 and self.delay > SLACK * self.due


@dataclass
class Devices:
    """What all emulated models of a pair have in common.

    Args:
        stretch: real seconds for each unit of the curve's times; None: nothing waits.
        now, sleep: the clock, in seconds; threads share it.
    """

    curve: Curve
    stretch: float | None = None
    passes: list[Pass] = field(default_factory=list)
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], object] = time.sleep

    def emulated(self, pair: LoadedPair) -> LoadedPair:
        """The pair with its target and draft on these devices, and no other model."""
        models: Mapping[Role, Model] = pair.models
        waiting = {
            role: cast(Model, EmulatedModel(self, role, models[role]))
            for role in EMULATED
            if role in models
        }
        return replace(pair, models=waiting)

    def run(self, role: Role, model: Model, rows: Sequence[Forward]) -> list[Span]:
        """One batch of forward passes, which ends at its deadline."""
        started, due = self.now(), self.curve.time_of(role, rows)
        spans = model.forward(rows)
        worked = self.now() - started
        if due is not None and self.stretch is not None and worked < due * self.stretch:
            self.sleep(due * self.stretch - worked)
        self.passes.append(Pass(role, due, worked, self.now() - started, self.stretch))
        return spans


class EmulatedModel:
    """A model on an emulated device; all but its passes is the model's own."""

    def __init__(self, devices: Devices, role: Role, model: Model):
        self.devices, self.role, self.model = devices, role, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, rows: Sequence[Forward]) -> list[Span]:
        """As the model's, and over when the curve says."""
        return self.devices.run(self.role, self.model, rows)
