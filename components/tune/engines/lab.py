"""Runs ways to speculate beside plain decoding: the plain engine stays, one other is started for
each way and ended after it. For two ways beside each other plain decoding ends: no more than two
engines are up at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from draftwell.components.bench.engines.figures import Figure, figure_of
from draftwell.components.bench.engines.measure import Beside, Group, groups_of, measure_beside
from draftwell.components.bench.interleaved import Progress
from draftwell.components.engines.port import About, Decoded, Engine, EngineSettings
from draftwell.components.engines.vllm_methods import OFF, Method, VllmFiles
from draftwell.components.report.intervals import TAIL
from draftwell.components.results import Results
from draftwell.components.tune.engines.budget import Budget
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
            try:
                plain = self.plain()
                with self.budget.starting():
                    other.start(self.settings(method))
                for level in missing:
                    groups = groups_of(self.prompts[:prompts], level, self.groups)
                    with self.budget.decoding(level, len(groups)):
                        made = self._measured(plain, other, groups)
                    self.store.put(self.name(method, stage, level), made)
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
        engines: list[Engine] = [
            engine if method.name == OFF else Tried(engine)
            for method in (one, two)
            for engine in [self.make(method.label)]
        ]
        try:
            for engine, method in zip(engines, (one, two), strict=True):
                with self.budget.starting():
                    engine.start(self.settings(method))
            groups = self.groups_at(level)
            if level == 1:
                # one place further the second time, so that the other engine is the first to be
                # asked for each of an even number
                groups += groups if len(groups) % 2 else [*groups[1:], groups[0]]
            with self.budget.decoding(level, len(groups)):
                first, second = engines
                return self._measured(first, second, groups)
        finally:
            for engine in engines:
                engine.stop()

    def _measured(self, one: Engine, two: Engine, groups: Sequence[Group]) -> Beside:
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
