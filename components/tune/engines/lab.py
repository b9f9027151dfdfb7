"""Runs ways to speculate beside plain decoding: the plain engine stays, one other is started for
each way and ended after it. For two ways beside each other plain decoding ends: no more than two
engines are up at once.

Of two equal engines on the same cores the one that was started second can be a sixth faster (vLLM
on two cores: the scheduler places the processes of the first one worse, and leaves them there). So
a comparison that decides starts both again after half of its groups, in the other order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from draftwell.components.bench.engines.figures import Figure, figure_of
from draftwell.components.bench.engines.measure import (
    Beside,
    Group,
    groups_of,
    joined,
    measure_beside,
    middle_of,
)
from draftwell.components.bench.interleaved import Progress
from draftwell.components.engines.port import About, Decoded, Engine, EngineSettings
from draftwell.components.engines.vllm_methods import OFF, Method, VllmFiles
from draftwell.components.report.intervals import TAIL
from draftwell.components.results import Results
from draftwell.components.tune.engines.budget import Budget
from draftwell.components.tune.engines.candidates import LENGTHS
from draftwell.components.tune.engines.settings import Lengths
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling

FATAL = frozenset(
    {
        "engine_killed",
        "engine_out_of_memory",
        "engine_version",
        "engine_device",
        "peer_not_installed",
        "engine_port_taken",
        "engine_not_stopped",
        "engine_key",
    }
)
"""Codes of failures that are of the machine or the engine, not of one way to speculate."""


GROUPS = 8
"""Of requests, at each load: as many as prompts are needed to choose anything."""


class MethodFails(DraftwellError):
    """The engine fails with one way to speculate, for another reason than `FATAL` ones: it says
    nothing of the others."""


@contextmanager
def failing(when: str) -> Iterator[None]:
    """Failures of the engine in the block, but for `FATAL` ones, are those of its way to
    speculate."""
    try:
        yield
    except DraftwellError as error:
        if error.code in FATAL:
            raise
        raise MethodFails(f"the engine {when}: {error}", code=error.code) from error


@contextmanager
def left_out_if_it_fails(out: dict[str, str], name: str) -> Iterator[None]:
    """A way that the engine fails with is left out with the reason, and the others are tried."""
    try:
        yield
    except MethodFails as error:
        out[name] = str(error)


class Tried:
    """An `Engine` that is measured beside plain decoding: it raises `MethodFails` where its way to
    speculate is to blame."""

    def __init__(self, engine: Engine):
        self.engine, self.label = engine, engine.label

    def start(self, settings: EngineSettings) -> About:
        with failing("does not start with it"):
            return self.engine.start(settings)

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        with failing("fails while it decodes with it"):
            return self.engine.decode(prompts, sampling)

    def stop(self) -> None:
        self.engine.stop()


@dataclass
class Lab:
    """What is needed to measure.

    Args:
        make: label → an engine, not yet started.
        prompts: token ids.
        slots, context: as in `EngineSettings`; all engines are started with the same.
        groups: of requests, at levels above 1.
        store: what is measured already.
        lengths: method → draft lengths that are tried.
        budget: learns what measurements cost.
        apart: only one engine can run at a time (`measure_beside`).
        tell: called with each figure of a way beside plain decoding.
    """

    make: Callable[[str], Engine]
    files: VllmFiles
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    slots: int
    context: int
    groups: int
    store: Results[Beside]
    progress: Progress | None = None
    budget: Budget = field(default_factory=Budget)
    apart: bool = False
    tell: Callable[[Figure], object] | None = None
    lengths: Mapping[str, Lengths] = field(default_factory=lambda: LENGTHS)
    _plain: Engine | None = field(default=None, init=False)

    @contextmanager
    def open(self) -> Iterator[Lab]:
        """Engines that were started inside the block end with it, whatever happens."""
        try:
            yield self
        finally:
            self.end_plain()

    def measure(
        self,
        method: Method,
        stage: str,
        levels: Sequence[int] = (1,),
        prompts: int | None = None,
        tail: float = TAIL,
    ) -> list[Figure]:
        """A way beside plain decoding at each level; what is in the store is not measured again.

        Args:
            stage: part of the names in the store.
            prompts: how many of the prompts, the first; None takes all.
            tail: left out at each end of an interval; whoever chooses among several divides `TAIL`
                by their number.
        Raises:
            MethodFails: the engine fails with this way, for another reason than `FATAL` ones.
            DraftwellError: it fails otherwise, or plain decoding does.
        """
        missing = [level for level in levels if self.name(method, stage, level) not in self.store]
        if missing:
            other = Tried(self.make(method.label))
            wanted = {
                self.name(method, stage, level): groups_of(
                    self.prompts[:prompts], level, self.groups
                )
                for level in missing
            }
            try:
                self._measure(method, other, wanted, decides=prompts is None)
            finally:
                other.stop()
        figures = [
            figure_of(method.label, self.found(method, stage, level), tail) for level in levels
        ]
        if self.tell is not None:
            for figure in figures:
                self.tell(figure)
        return figures

    def between(self, one: Method, two: Method, stage: str, level: int = 1) -> Beside:
        """Two ways beside each other, one request at a time with every prompt twice, or at a higher
        level; plain decoding ends before.

        Returns:
            `plain` is `one`, `other` is `two`.
        Raises:
            MethodFails, DraftwellError: as `measure`.
        """
        at = f" at {level}" if level > 1 else ""
        return self.store.get(
            f"{stage} {one.label} beside {two.label}{at}", lambda: self._beside(one, two, level)
        )

    def _beside(self, one: Method, two: Method, level: int) -> Beside:
        self.end_plain()
        groups = self.groups_at(level)
        if level == 1:
            groups += groups
        first, second = engines = [self._engine(method) for method in (one, two)]
        try:
            self._start(first, one)
            self._start(second, two)
            if self.apart:
                return self._measured(first, second, groups)
            half = middle_of(groups)
            begun = self._measured(first, second, groups[:half])
            for engine in engines:
                engine.stop()
            self._start(second, two)
            self._start(first, one)
            # the other one is asked first now, so that each is the first for every prompt
            rest = self._measured(second, first, groups[half:])
            turned = rest.model_copy(update={"plain": rest.other, "other": rest.plain})
            return joined(groups, begun, turned)
        finally:
            for engine in engines:
                engine.stop()

    def _engine(self, method: Method) -> Engine:
        engine = self.make(method.label)
        return engine if method.name == OFF else Tried(engine)

    def _start(self, engine: Engine, method: Method) -> None:
        with self.budget.starting():
            engine.start(self.settings(method))

    def _measure(
        self, method: Method, other: Engine, wanted: Mapping[str, Sequence[Group]], *, decides: bool
    ) -> None:
        """Measure a way on all groups by name, started after plain decoding; where it decides,
        before it for the second half of each."""
        if not decides or self.apart or min(map(len, wanted.values())) == 1:
            self.plain()
            self._start(other, method)
            for name, groups in wanted.items():
                self.store.put(name, self._measured(self.plain(), other, groups))
            return
        if any(f"{name}, half 1" not in self.store for name in wanted):
            self.plain()
            self._start(other, method)
            for name, groups in wanted.items():
                self._half(f"{name}, half 1", other, groups[: middle_of(groups)])
            other.stop()
        self.end_plain()
        self._start(other, method)
        for name, groups in wanted.items():
            rest = self._half(f"{name}, half 2", other, groups[middle_of(groups) :])
            self.store.put(name, joined(groups, self.store[f"{name}, half 1"], rest))

    def _half(self, name: str, other: Engine, groups: Sequence[Group]) -> Beside:
        return self.store.get(name, lambda: self._measured(self.plain(), other, groups))

    def _measured(self, one: Engine, two: Engine, groups: Sequence[Group]) -> Beside:
        with self.budget.decoding(len(groups[0]), len(groups)):
            return measure_beside(
                one, two, groups, self.sampling, progress=self.progress, apart=self.apart
            )

    def has(self, method: Method, stage: str, level: int = 1) -> bool:
        """Whether it was measured already."""
        return self.name(method, stage, level) in self.store

    def groups_at(self, level: int) -> list[list[Sequence[int]]]:
        """What is measured at a level, of all prompts."""
        return groups_of(self.prompts, level, self.groups)

    def found(self, method: Method, stage: str, level: int = 1) -> Beside:
        """What was measured."""
        return self.store[self.name(method, stage, level)]

    @property
    def more_starts(self) -> tuple[tuple[()], ...]:
        """For `Budget.allows`: of a comparison that decides, beside its first start of the other
        engine. Those of engines that take turns are part of what a group costs."""
        return () if self.apart else ((), (), ())

    def plain(self) -> Engine:
        """Plain decoding, started at its first use."""
        if self._plain is None:
            engine = self.make(OFF)
            engine.start(self.settings(Method()))
            self._plain = engine
        return self._plain

    def end_plain(self) -> None:
        """End plain decoding; it starts again at its next use."""
        if self._plain is not None:
            self._plain.stop()
            self._plain = None

    def settings(self, method: Method) -> EngineSettings:
        """What an engine is started with."""
        return EngineSettings(
            speculation=method.speculative_config(self.files),
            slots=self.slots,
            context=self.context,
        )

    @staticmethod
    def name(method: Method, stage: str, level: int) -> str:
        """In the store."""
        return f"{stage} {method.label} at {level}"
