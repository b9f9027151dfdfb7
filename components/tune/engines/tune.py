"""The search: every way on a few prompts, the best on all of them, then lengths by load. Plain decoding is always among them, and is chosen
unless another way is surely faster. Where time is short (`Lab.budget`), what is measured is what promises most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pydantic import Field

from components.bench.engines.figures import TAIL, Figure
from components.bench.engines.measure import Beside
from components.engines.port import Message
from components.engines.vllm_methods import OFF, ONE_LENGTH, Method
from components.report.intervals import FEWEST_PROMPTS
from components.tune.engines.budget import NO_TIME
from components.tune.engines.candidates import candidates, first_ngram, left_out, lengths_of
from components.tune.engines.lab import DoesNotStart, Lab
from components.tune.engines.ngram_replay import Text
from components.tune.engines.schedule import Level, level_of, schedule_of
from components.tune.engines.settings import EngineTuneSettings


class EngineChoice(Message):
    """What a tuning chose, why, and all that it measured."""

    method: str = Field(description="one of vLLM's methods, or off")
    k: int
    n: int
    schedule: tuple[tuple[int, int, int], ...] = Field((), strict=False)
    reason: str
    levels: tuple[Level, ...] = Field((), strict=False, description="lengths by load, where several loads were measured")
    explored: tuple[Figure, ...] = Field((), strict=False)
    confirmed: tuple[Figure, ...] = Field((), strict=False)
    loads: tuple[Figure, ...] = Field((), strict=False, description="of each length at each load above 1")
    scheduled: tuple[Figure, ...] = Field((), strict=False, description="of the lengths by load, at each load")
    left_out: dict[str, str] = Field(default_factory=dict)

    @property
    def chosen(self) -> Method:
        """The way."""
        return Method(self.method, self.k, self.n, self.schedule)


def tune_engine(lab: Lab, settings: EngineTuneSettings, lacks: Callable[[str], bool] = lambda package: False,
                texts: Sequence[Text] | None = None) -> EngineChoice:
    """Choose how an engine speculates, by running it.

    Args:
        lab: with as many slots as the highest level.
        lacks: whether a distribution is missing in the engine's environment.
        texts: greedy texts of the target, which decide which n-grams are looked up; None: those of the first measurement do.
    Raises:
        DraftwellError: what engines raise. What was finished is in the lab's store.
    """
    out = left_out(settings, lab.files, lacks)
    with lab.open():
        explored = explore(lab, settings, [name for name in settings.methods if name not in out and name != OFF], out, texts)
        best = sorted(explored, key=lambda method: -explored[method].ratio)[: settings.confirm]
        confirmed: dict[Method, Figure] = {}
        for method in best:
            if confirmed and not lab.has(method, "confirm") and not lab.budget.allows([(1, len(lab.prompts))]):
                out[method.label] = NO_TIME
                continue
            with left_out_if_it_does_not_start(out, method.label):
                confirmed[method] = lab.measure(method, "confirm", tail=TAIL / len(best))[0]
        winner, reason = decide(confirmed)
        found = EngineChoice(method=winner.name, k=winner.k, n=winner.n, reason=reason, explored=tuple(explored.values()),
                             confirmed=tuple(confirmed.values()), left_out=out)
        return found if winner.name == OFF or len(settings.levels) == 1 else with_schedule(lab, settings, winner, found)


def explore(lab: Lab, settings: EngineTuneSettings, names: Sequence[str], out: dict[str, str],
            texts: Sequence[Text] | None) -> dict[Method, Figure]:
    """Measure every way on a few prompts: the middle length of each method, then the other lengths, those of the fastest method first.

    Args:
        out: gets what does not start, and what there was no time for.
    """
    found: dict[Method, Figure] = {}
    others: dict[Method, list[Method]] = {}
    to_come = [[(1, len(lab.prompts))]] * settings.confirm

    def measure(name: str, method: Method) -> None:
        """`name` is what is left out where it does not start: the method, or one of its lengths."""
        if not lab.has(method, "explore") and not lab.budget.allows([(1, settings.explore)], *to_come):
            out[method.label] = NO_TIME
            return
        with left_out_if_it_does_not_start(out, name):
            found[method] = lab.measure(method, "explore", prompts=settings.explore)[0]

    for name in names:
        with left_out_if_it_does_not_start(out, name):
            known = plain_texts(lab, settings) if name == "ngram" and texts is None else texts
            first, *rest = candidates([name], settings, known)
            measure(name, first)
            others[first] = rest
    for first in sorted(others, key=lambda one: -found[one].ratio if one in found else 0.0):
        for method in others[first] if first.name not in out else ():
            measure(method.label, method)
    return found


def grid_of(lab: Lab, settings: EngineTuneSettings, choice: EngineChoice, texts: Sequence[Text] | None) -> dict[str, Beside]:
    """All that a tuning chooses among, measured on all prompts, one request at a time; what was confirmed is not measured again.

    Returns:
        label → measurement; what does not start is missing.
    """
    found: dict[str, Beside] = {}
    with lab.open():
        for name in settings.methods:
            if name in choice.left_out or name == OFF:
                continue
            known = plain_texts(lab, settings) if name == "ngram" and texts is None else texts
            for method in candidates([name], settings, known):
                with left_out_if_it_does_not_start({}, name):
                    lab.measure(method, "confirm")
                    found[method.label] = lab.found(method, "confirm")
    return found


@contextmanager
def left_out_if_it_does_not_start(out: dict[str, str], name: str) -> Iterator[None]:
    """A way with which the engine does not start is left out with the reason, and the others are tried."""
    try:
        yield
    except DoesNotStart as error:
        out[name] = f"the engine does not start with it: {error}"


def plain_texts(lab: Lab, settings: EngineTuneSettings) -> list[Text] | None:
    """Texts of plain decoding, from the first measurement; None for sampled requests, which texts predict nothing for."""
    if settings.temperature > 0:
        return None
    first = first_ngram(settings)
    lab.measure(first, "explore", prompts=settings.explore)
    outputs = lab.found(first, "explore").plain.outputs
    return [(prompt, output[0]) for prompt, output in zip(lab.prompts, outputs, strict=False)]


def decide(confirmed: dict[Method, Figure]) -> tuple[Method, str]:
    """The fastest way whose lower bound is above 1, else plain decoding; and why, in a sentence."""
    if not confirmed:
        return Method(), "plain decoding, because there was nothing to compare it with"
    ranked = sorted(confirmed.items(), key=lambda item: -item[1].ratio)
    best, figure = ranked[0]
    if figure.prompts < FEWEST_PROMPTS:
        return Method(), (f"plain decoding, because {figure.prompts} prompts are too few to choose anything else: measure on at least "
                          f"{FEWEST_PROMPTS}; the best there, {best.label}, was {figure.ratio:.2f} times as fast")
    for method, one in ranked:
        if one.surely_faster:
            return method, f"{method.label} is {one.ratio:.2f} times as fast as plain decoding (at least {one.low:.2f} times)"
    return Method(), (f"plain decoding, because nothing is surely faster: the best, {best.label}, measured {figure.ratio:.2f} times its "
                      f"speed with a lower bound of {figure.low:.2f}")


def with_schedule(lab: Lab, settings: EngineTuneSettings, winner: Method, choice: EngineChoice) -> EngineChoice:
    """Measure all lengths of the chosen method at the other loads, then the lengths by load at all of them.

    A load at which drafts then are not surely faster gets none, and what is left is measured again.
    """
    higher = settings.levels[1:]
    lengths = (winner.k,) if winner.name in ONE_LENGTH else lengths_of(winner.name, settings)  # one length at all loads, or none
    out, loads = dict(choice.left_out), dict[int, list[Figure]]()
    schedule_too = [[(level, settings.groups) for level in some] for some in (higher, settings.levels)]
    for k in sorted(lengths, key=lambda k: k != winner.k):
        if not lab.budget.allows(*schedule_too):
            out[f"{winner.with_k(k).label} at {', '.join(map(str, higher))} at once"] = NO_TIME
            continue
        with left_out_if_it_does_not_start(out, winner.with_k(k).label):
            loads[k] = lab.measure(winner.with_k(k), "load", higher, tail=TAIL / len(lengths))
    if not loads and not lab.budget.allows(*schedule_too):
        return choice.model_copy(update={"left_out": out})
    if not loads:
        return plain_instead(choice, out, "plain decoding, because the engine does not start a second time with what was chosen")
    levels = [Level(at_once=1, k=winner.k, open=(winner.k,))]
    levels += [level_of(level, {k: figures[i] for k, figures in loads.items()}) for i, level in enumerate(higher)]
    found = choice.model_copy(update={"loads": tuple(figure for row in loads.values() for figure in row), "left_out": out})
    while True:
        schedule = schedule_of(levels)
        longest = max(level.k for level in levels)
        if longest == 0 or (winner.name in ONE_LENGTH and len(schedule) > 1):
            where = "at any load" if longest == 0 else f"at all loads, and {winner.name} has one length for all of them"
            return plain_instead(found, out, f"plain decoding, because nothing is surely faster {where}")
        found = found.model_copy(update={"levels": tuple(levels)})
        if len(schedule) == 1:
            return found
        timed = replace(winner, k=longest, schedule=schedule)
        scheduled: list[Figure] = []
        with left_out_if_it_does_not_start(out, timed.label):
            scheduled = lab.measure(timed, "schedule", settings.levels)
        if not scheduled:
            return plain_instead(found, out, "plain decoding, because the engine does not start with lengths by load")
        unsure = {figure.at_once for figure in scheduled if not figure.surely_faster}
        found = found.model_copy(update={"k": longest, "schedule": schedule, "scheduled": tuple(scheduled),
                                         "reason": f"{choice.reason}; {by_load(levels, scheduled)}"})
        if not any(level.k and level.at_once in unsure for level in levels):
            return found
        levels = [without_drafts(level) if level.at_once in unsure else level for level in levels]


def plain_instead(choice: EngineChoice, out: dict[str, str], reason: str) -> EngineChoice:
    """Plain decoding, with all that was measured."""
    return choice.model_copy(update={"method": OFF, "k": 0, "n": 0, "levels": (), "schedule": (), "reason": reason, "left_out": out})


def without_drafts(level: Level) -> Level:
    """The same load with plain decoding: what was chosen for it was not surely faster when it was run."""
    return level.model_copy(update={"k": 0, "open": tuple(sorted({0, *level.open}))})


def by_load(levels: Sequence[Level], scheduled: Sequence[Figure]) -> str:
    """The lengths by load in words, and loads at which they are surely slower than plain decoding."""
    words = ", ".join(f"{level.k} tokens at {level.at_once}" for level in levels)
    slower = [str(figure.at_once) for figure in scheduled if figure.surely_slower]
    return f"by load: {words}" + (f"; surely slower than plain decoding at {', '.join(slower)} at once" if slower else "")
