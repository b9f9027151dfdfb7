"""Draft lengths by load for the finalists of a tuning, the fastest first, until one is found that
pays at all loads; else plain decoding.

It pays where it is surely faster than plain decoding at every load at which it drafts, and not
surely slower at the others. N-grams cost nothing where nothing is drafted. For others a length of 0
is no plain decoding: with `draft_model` and `eagle3` vLLM runs a pass of the drafter all the same,
to keep its cache complete, and returns an empty draft only then
(`vllm/v1/spec_decode/llm_base_proposer.py`, 0.32). So it is measured like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftwell.components.bench.engines.figures import TAIL, Figure
from draftwell.components.engines.vllm_methods import OFF, ONE_LENGTH, Method
from draftwell.components.tune.engines.budget import NO_TIME
from draftwell.components.tune.engines.candidates import lengths_of
from draftwell.components.tune.engines.choice import EngineChoice
from draftwell.components.tune.engines.lab import Lab, left_out_if_it_fails
from draftwell.components.tune.engines.schedule import Level, level_of, schedule_of
from draftwell.components.tune.engines.settings import EngineTuneSettings

BECAUSE = "plain decoding, because "
Finalist = tuple[Method, str]
"""A setting that is surely faster with one request at a time, and that in a sentence."""


def choose_by_load(
    lab: Lab,
    settings: EngineTuneSettings,
    finalists: Sequence[Finalist],
    found: EngineChoice,
    tries: int = 0,
    before: str = "",
) -> EngineChoice:
    """The first of the finalists that pays at all loads; plain decoding after the last.

    Where there is no time to measure the first at other loads, it is chosen without them; after one
    that did not pay there, none is. What failed before the choice is in `left_out`.

    Args:
        finalists: at least one, the fastest first.
        found: with all that was measured at one request at a time.
        tries: methods that are tried at most, which share what intervals leave out; 0: the
            finalists'.
        before: why plain decoding was to be chosen without these.
    Raises:
        DraftwellError: as `tune_engine`.
    """
    tried = once_each(finalists)
    failed: dict[str, str] = {}
    for method, reason in tried:
        begun = found.model_copy(
            update={
                "method": method.name,
                "k": method.k,
                "n": method.n,
                "reason": reason,
                "levels": (),
                "schedule": (),
                "scheduled": (),
            }
        )
        found = with_lengths(lab, settings, method, begun, tries or len(tried))
        if found.method != OFF and (found.levels or not (failed or before)):
            return found.model_copy(update={"left_out": {**found.left_out, **failed}})
        failed[f"{method.label} by load"] = found.reason if found.method == OFF else NO_TIME
    reasons = [before.removeprefix(BECAUSE)] * bool(before) + list(failed.values())
    return found.model_copy(update={"left_out": {**found.left_out, **failed}}).off(
        BECAUSE + "; ".join(reasons)
    )


def once_each(finalists: Sequence[Finalist]) -> list[Finalist]:
    """Without those that would be tried again: all lengths of a method are, whichever of them was
    confirmed.

    >>> [
    ...     method.k
    ...     for method, _ in once_each(
    ...         [(Method("eagle3", k), "") for k in (2, 3)]
    ...         + [(Method("suffix", k), "") for k in (4, 8)]
    ...     )
    ... ]
    [2, 4, 8]
    """
    found: dict[object, Finalist] = {}
    for method, reason in finalists:
        found.setdefault(method if method.name in ONE_LENGTH else method.family, (method, reason))
    return list(found.values())


def with_lengths(
    lab: Lab, settings: EngineTuneSettings, winner: Method, choice: EngineChoice, tries: int
) -> EngineChoice:
    """Lengths by load of one method; `off` with the reason where they do not pay.

    Args:
        choice: of the winner, with one request at a time.
        tries: methods that are tried at most, which share what intervals leave out.
    """
    higher = settings.levels[1:]
    out = dict(choice.left_out)
    loads = measure_loads(lab, settings, winner, out, tries)
    found = choice.model_copy(
        update={
            "left_out": out,
            "loads": (*choice.loads, *(one for row in loads.values() for one in row)),
        }
    )
    if not loads:
        late = any(why == NO_TIME for name, why in out.items() if name not in choice.left_out)
        return (
            found
            if late
            else found.off(f"the engine does not run {winner.label} with several requests at once")
        )
    levels = [Level(at_once=1, k=winner.k, open=(winner.k,))]
    levels += [
        level_of(level, {k: figures[i] for k, figures in loads.items()})
        for i, level in enumerate(higher)
    ]
    return run_together(lab, settings, winner, found, levels, tries)


def measure_loads(
    lab: Lab, settings: EngineTuneSettings, winner: Method, out: dict[str, str], tries: int
) -> dict[int, list[Figure]]:
    """Each length at each load above 1, that of the winner first; methods of one length have no
    other.

    Args:
        out: gets what fails, and what there was no time for.
    Returns:
        k → a figure for each load.
    """
    higher = settings.levels[1:]
    lengths = (winner.k,) if winner.name in ONE_LENGTH else lengths_of(winner.name, settings)
    together = load_engines(lab, settings)
    loads: dict[int, list[Figure]] = {}
    for method in (winner.with_k(k) for k in sorted(lengths, key=lambda k: k != winner.k)):
        if not all(lab.has(method, "load", level) for level in higher) and not lab.budget.allows(
            *together
        ):
            out[f"{method.label} at {', '.join(map(str, higher))} at once"] = NO_TIME
            continue
        with left_out_if_it_fails(out, method.label):
            loads[method.k] = lab.measure(method, "load", higher, tail=TAIL / len(lengths) / tries)
    return loads


def load_engines(lab: Lab, settings: EngineTuneSettings) -> list[list[tuple[int, int]]]:
    """What lengths by load take at least, as `Budget.allows` takes it: a length at the higher
    loads, and the lengths together at all."""
    higher = [(level, settings.groups) for level in settings.levels[1:]]
    return [higher, [(1, len(lab.prompts)), *higher]] if higher else []


def run_together(
    lab: Lab,
    settings: EngineTuneSettings,
    winner: Method,
    found: EngineChoice,
    levels: Sequence[Level],
    tries: int,
) -> EngineChoice:
    """Measure lengths by load as they are served.

    A load at which drafts then are not surely faster gets none, and what is left is measured again.
    """
    while True:
        longest, schedule = max(level.k for level in levels), schedule_of(levels)
        if longest == 0:
            return found.off(f"{winner.name} is surely faster than plain decoding at no load")
        if winner.name in ONE_LENGTH and len(schedule) > 1:
            return found.off(
                f"{winner.label} is not surely faster at all loads, and {winner.name} has "
                "one length for all of them"
            )
        found = found.model_copy(update={"levels": tuple(levels)})
        if len(schedule) == 1:
            return found
        timed, out = replace(winner, k=longest, schedule=schedule), dict(found.left_out)
        scheduled: list[Figure] = []
        with left_out_if_it_fails(out, timed.label):
            scheduled = lab.measure(timed, "schedule", settings.levels, tail=TAIL / tries)
        found = found.model_copy(
            update={"left_out": out, "scheduled": tuple(scheduled) or found.scheduled}
        )
        if not scheduled:
            return found.off(f"the engine does not run {winner.name} with lengths by load")
        unsure = {figure.at_once for figure in scheduled if not figure.surely_faster}
        if any(level.k and level.at_once in unsure for level in levels):
            levels = [
                without_drafts(level) if level.at_once in unsure else level for level in levels
            ]
            continue
        if slower := slower_without_drafts(levels, lab.measure(timed, "schedule", settings.levels)):
            return found.off(f"{timed.label} is {slower}")
        words = ", ".join(f"{level.k} tokens at {level.at_once}" for level in levels)
        return found.model_copy(
            update={
                "k": longest,
                "schedule": schedule,
                "reason": f"{found.reason}; by load: {words}",
            }
        )


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
