"""Draft length by load for what is surely faster with one request at a time, the fastest first,
until one is found that pays at all loads; else plain decoding.

It pays where it is surely faster than plain decoding at every load at which it drafts, and not
surely slower at the others. N-grams cost nothing where nothing is drafted. For others a length of 0
is no plain decoding: with `draft_model` and `eagle3` vLLM runs a pass of the drafter all the same,
to keep its cache complete, and returns an empty draft only then
(`vllm/v1/spec_decode/llm_base_proposer.py`, 0.32). So it is measured like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.engines.vllm_methods import OFF, ONE_LENGTH, Method, schedule_of
from draftwell.components.report.intervals import TAIL
from draftwell.components.tune.engines.budget import NO_TIME
from draftwell.components.tune.engines.choice import EngineChoice
from draftwell.components.tune.engines.lab import Lab, left_out_if_it_fails
from draftwell.components.tune.engines.settings import EngineTuneSettings
from draftwell.components.tune.levels import Level, level_of, table_of

Ranked = Sequence[tuple[Method, str]]
"""Settings that are surely faster with one request at a time, the fastest first, and that in a
sentence."""


def choose_by_load(
    lab: Lab, settings: EngineTuneSettings, ranked: Ranked, found: EngineChoice
) -> EngineChoice:
    """The first that pays at all loads; plain decoding after the last.

    Where there is no time to measure the first at other loads, it is chosen without them; after one
    that did not pay there, none is. What failed before the choice is in `left_out`.

    Args:
        ranked: at least one.
        found: with all that was measured at one request at a time.
    Raises:
        DraftwellError: as `tune_engine`.
    """
    tried = once_each(ranked)
    failed: dict[str, str] = {}
    for method, reason in tried:
        found = with_lengths(lab, settings, method, found.of(method, reason), len(tried))
        if found.method != OFF and (found.levels or not failed):
            return found.model_copy(update={"left_out": {**found.left_out, **failed}})
        failed[f"{method.label} by load"] = found.reason if found.method == OFF else NO_TIME
    found = found.model_copy(update={"left_out": {**found.left_out, **failed}})
    return found.off("plain decoding, because " + "; ".join(failed.values()))


def once_each(ranked: Ranked) -> list[tuple[Method, str]]:
    """Without those that would be tried again: all lengths of a method are, whichever of them was
    confirmed.

    >>> heads = [(Method("eagle3", k), "") for k in (2, 3)]
    >>> [method.k for method, _ in once_each([*heads, (Method("suffix", 4), "")])]
    [2, 4]
    """
    found: dict[object, tuple[Method, str]] = {}
    for method, reason in ranked:
        found.setdefault(method if method.name in ONE_LENGTH else method.family, (method, reason))
    return list(found.values())


def with_lengths(
    lab: Lab, settings: EngineTuneSettings, method: Method, choice: EngineChoice, tries: int
) -> EngineChoice:
    """Lengths by load of one method; `off` with the reason where they do not pay.

    Args:
        choice: of the method, with one request at a time.
        tries: methods that are tried at most, which share what intervals leave out.
    """
    out = dict(choice.left_out)
    loads = measure_loads(lab, settings, method, out, tries)
    measured = tuple(figure for row in loads.values() for figure in row)
    found = choice.model_copy(update={"left_out": out, "loads": (*choice.loads, *measured)})
    if not loads:
        late = any(why == NO_TIME for name, why in out.items() if name not in choice.left_out)
        return (
            found
            if late
            else found.off(f"the engine does not run {method.label} with several requests at once")
        )
    levels = [Level(at_once=1, k=method.k, open=(method.k,))]
    levels += [
        level_of(level, {k: figures[i] for k, figures in loads.items()})
        for i, level in enumerate(settings.levels[1:])
    ]
    return run_together(lab, settings, method, found, levels, tries)


def measure_loads(
    lab: Lab, settings: EngineTuneSettings, method: Method, out: dict[str, str], tries: int
) -> dict[int, list[Figure]]:
    """Length → a figure for each load above 1, the method's own length first; methods of one length
    have no other.

    Args:
        out: gets what fails, and what there was no time for.
    """
    higher = settings.levels[1:]
    lengths = (method.k,) if method.name in ONE_LENGTH else lab.lengths[method.name]
    groups = [(level, lab.groups) for level in higher]
    together = [(1, len(lab.prompts)), *groups]
    loads: dict[int, list[Figure]] = {}
    for one in (method.with_k(k) for k in sorted(lengths, key=lambda k: k != method.k)):
        known = all(lab.has(one, "load", level) for level in higher)
        if not known and not lab.budget.allows(groups, together, *2 * lab.more_starts):
            out[f"{one.label} at {', '.join(map(str, higher))} at once"] = NO_TIME
            continue
        with left_out_if_it_fails(out, one.label):
            loads[one.k] = lab.measure(one, "load", higher, tail=TAIL / len(lengths) / tries)
    return loads


def run_together(
    lab: Lab,
    settings: EngineTuneSettings,
    method: Method,
    found: EngineChoice,
    levels: Sequence[Level],
    tries: int,
) -> EngineChoice:
    """Measure lengths by load as they are served.

    A load at which drafts then are not surely faster gets none, and what is left is measured again.
    """
    name = method.name
    while (longest := max(level.k for level in levels)) > 0:
        schedule = schedule_of(table_of(levels))
        if name in ONE_LENGTH and len(schedule) > 1:
            return found.off(
                f"{method.label} is not surely faster at all loads, and {name} has one length for "
                "all of them"
            )
        found = found.model_copy(update={"levels": tuple(levels)})
        if len(schedule) == 1:
            return found
        timed, out = replace(method, k=longest, schedule=schedule), dict(found.left_out)
        figures: list[Figure] = []
        with left_out_if_it_fails(out, timed.label):
            figures = lab.measure(timed, "schedule", settings.levels, tail=TAIL / tries)
        found = found.model_copy(
            update={"left_out": out, "scheduled": tuple(figures) or found.scheduled}
        )
        if not figures:
            return found.off(f"the engine does not run {name} with lengths by load")
        unsure = {figure.at_once for figure in figures if not figure.surely_faster}
        if not any(level.k and level.at_once in unsure for level in levels):
            if slower := slower_without_drafts(
                levels, lab.measure(timed, "schedule", settings.levels)
            ):
                return found.off(f"{timed.label} is {slower}")
            words = ", ".join(f"{level.k} tokens at {level.at_once}" for level in levels)
            reason = f"{found.reason}; by load: {words}"
            return found.model_copy(update={"k": longest, "schedule": schedule, "reason": reason})
        levels = [without_drafts(level) if level.at_once in unsure else level for level in levels]
    return found.off(f"{name} is surely faster than plain decoding at no load")


def slower_without_drafts(levels: Sequence[Level], scheduled: Sequence[Figure]) -> str:
    """Where nothing is drafted and it is surely slower than plain decoding all the same, in words;
    empty: nowhere.

    The gate would refuse it.
    """
    idle = {level.at_once for level in levels if level.k == 0}
    slower = [figure for figure in scheduled if figure.at_once in idle and figure.surely_slower]
    where = ", ".join(f"{figure.at_once} at once ({figure.ratio:.2f} times)" for figure in slower)
    return (
        f"surely slower than plain decoding at {where}, though nothing is drafted there"
        if slower
        else ""
    )


def without_drafts(level: Level) -> Level:
    """The same load with nothing drafted: what was chosen for it was not surely faster when it was
    run."""
    return level.model_copy(update={"k": 0, "open": tuple(sorted({0, *level.open}))})
