"""The search: every way on a few prompts, the best on all of them, then lengths by load. Plain
decoding is always among them, and is chosen unless another way is surely faster, at all loads
(`by_load`). Where time is short (`Lab.budget`), what promises most is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.engines.vllm_methods import OFF, Method
from draftwell.components.report.intervals import TAIL
from draftwell.components.tune.decision import Contender, choosable, why_chosen, why_plain
from draftwell.components.tune.engines.budget import NO_TIME
from draftwell.components.tune.engines.by_load import choose_by_load
from draftwell.components.tune.engines.candidates import candidates, first_ngram, left_out
from draftwell.components.tune.engines.choice import EngineChoice
from draftwell.components.tune.engines.imported import (
    Imported,
    beside_imported,
    check_imported,
    with_lengths_of,
)
from draftwell.components.tune.engines.lab import Lab, left_out_if_it_fails
from draftwell.components.tune.engines.ngram_replay import Text
from draftwell.components.tune.engines.settings import EngineTuneSettings
from draftwell.components.tune.halving import best_of_each, halve
from draftwell.serving.errors import DraftwellError

PLAIN = "plain decoding"
EXPLORED = 6
"""Prompts on which every way is measured: enough to tell which are worth more of them."""
CONFIRMED = 3
"""Ways, the best of those, that are measured on all prompts: each more costs a whole measurement,
and takes part of what the intervals of the others may leave out."""


def tune_engine(
    lab: Lab,
    settings: EngineTuneSettings,
    lacks: Callable[[str], bool] = lambda package: False,
    texts: Sequence[Text] | None = None,
    imported: Imported | None = None,
) -> EngineChoice:
    """Choose how an engine speculates, by running it.

    Args:
        lab: with as many slots as the highest level.
        lacks: whether a distribution is missing in the engine's environment.
        texts: greedy texts of the target, which decide which n-grams are looked up; None: those of
            the first measurement do.
        imported: a schedule that was tuned elsewhere, which is tried beside what is found.
    Raises:
        DraftwellError: what engines raise, but for what only one way to speculate fails with; every
            one that was tried fails (`no_method_runs`), or there was time for none (`no_time`).
            What was finished is in the lab's store.
    """
    if imported is not None:
        check_imported(settings, imported)
        lab.lengths = with_lengths_of(lab.lengths, imported)
    with lab.open():
        found = search(lab, settings, lacks, texts)
        return found if imported is None else beside_imported(lab, settings, imported, found)


def search(
    lab: Lab,
    settings: EngineTuneSettings,
    lacks: Callable[[str], bool],
    texts: Sequence[Text] | None,
) -> EngineChoice:
    """`tune_engine` in a lab that is open, by the settings alone."""
    lacking = left_out(settings, lab.files, lacks)
    out = dict(lacking)
    names = [name for name in settings.methods if name not in out and name != OFF]
    explored: dict[Method, Figure] = {}

    def rung(entrants: Sequence[Method], start: int, end: int) -> list[Method]:
        explored.update(explore(lab, entrants, out) or first_measured(lab, entrants))
        return finalists_of(explored, settings)

    # one rung: starting an engine takes longer than all the prompts of another one
    finalists = halve(
        rung,
        ways(lab, settings, names, out, texts),
        len(lab.prompts),
        first=EXPLORED,
        finalists=CONFIRMED,
    )
    tail = TAIL / max(1, len(finalists))
    confirmed = confirm(lab, finalists, out, tail)
    if not confirmed:
        refuse_unmeasured({name: why for name, why in out.items() if name not in lacking})
    contenders = [
        Contender(method, figure.label, figure.ratio, figure.low, figure.prompts)
        for method, figure in confirmed.items()
    ]
    found = EngineChoice(
        method=OFF,
        k=0,
        n=0,
        reason=why_plain(contenders, PLAIN),
        explored=tuple(explored.values()),
        confirmed=tuple(confirmed.values()),
        left_out=out,
    )
    ranked = [(one.setting, why_chosen(one, PLAIN, tail)) for one in choosable(contenders)]
    if ranked and len(settings.levels) > 1:
        return choose_by_load(lab, settings, ranked, found)
    return found.of(*ranked[0]) if ranked else found


def ways(
    lab: Lab,
    settings: EngineTuneSettings,
    names: Sequence[str],
    out: dict[str, str],
    texts: Sequence[Text] | None,
) -> list[Method]:
    """All ways of these methods. Where no texts were collected, those of plain decoding in a first
    measurement say which n-grams are looked up; sampled ones predict nothing.

    Args:
        out: gets what that measurement fails with.
    """
    if "ngram" in names and texts is None and settings.temperature == 0:
        first = first_ngram(lab.lengths)
        with left_out_if_it_fails(out, "ngram"):
            lab.measure(first, "explore", prompts=EXPLORED)
            outputs = lab.found(first, "explore").plain.outputs
            texts = [(ids, output[0]) for ids, output in zip(lab.prompts, outputs, strict=False)]
    return candidates([name for name in names if name not in out], lab.lengths, texts)


def explore(lab: Lab, entrants: Sequence[Method], out: dict[str, str]) -> dict[Method, Figure]:
    """Measure ways on a few prompts: the middle length of each method, then the other lengths,
    those of the fastest method first.

    Args:
        entrants: a method's middle length before its others.
        out: gets what fails, and what there was no time for.
    """
    found: dict[Method, Figure] = {}
    to_come = [[(1, len(lab.prompts))], *lab.more_starts] * CONFIRMED

    def measure(name: str, method: Method) -> None:
        """`name` is what is left out where it fails: the method, or one of its lengths."""
        if not lab.has(method, "explore") and not lab.budget.allows([(1, EXPLORED)], *to_come):
            out[method.label] = NO_TIME
            return
        with left_out_if_it_fails(out, name):
            found[method] = lab.measure(method, "explore", prompts=EXPLORED)[0]

    firsts: dict[str, Method] = {}
    for method in entrants:
        if method.name not in firsts:
            firsts[method.name] = method
            measure(method.name, method)
    ratios = {name: found[first].ratio for name, first in firsts.items() if first in found}
    for method in sorted(entrants, key=lambda one: -ratios.get(one.name, 0.0)):
        if method not in firsts.values() and method.name not in out:
            measure(method.label, method)
    return found


def first_measured(lab: Lab, entrants: Sequence[Method]) -> dict[Method, Figure]:
    """The n-gram way whose texts preferred another n, where no time was left for any of the
    entrants: what is measured is better than nothing."""
    first = first_ngram(lab.lengths)
    if first.name not in {one.name for one in entrants} or not lab.has(first, "explore"):
        return {}
    return {first: lab.measure(first, "explore", prompts=EXPLORED)[0]}


def finalists_of(explored: Mapping[Method, Figure], settings: EngineTuneSettings) -> list[Method]:
    """The ways that are measured on all prompts: the fastest, and where several loads are measured
    the fastest of each method first, because lengths of one method share its price at other loads.
    What is surely slower than plain decoding is none."""
    ranked = sorted(explored, key=lambda method: -explored[method].ratio)
    fit = [method for method in ranked if not explored[method].surely_slower] or ranked[:1]
    several = len(settings.levels) > 1
    kind: Callable[[Method], Any] = lambda one: one.name if several else one  # noqa: E731
    return best_of_each(fit, kind, CONFIRMED)


def confirm(
    lab: Lab, methods: Sequence[Method], out: dict[str, str], tail: float
) -> dict[Method, Figure]:
    """Measure ways on all prompts, the first of them even where time is short.

    Args:
        out: gets what fails, and what there was no time for.
    """
    found: dict[Method, Figure] = {}
    for method in methods:
        time = lab.budget.allows([(1, len(lab.prompts))], *lab.more_starts)
        known = lab.has(method, "confirm") or time
        if found and not known:
            out[method.label] = NO_TIME
            continue
        with left_out_if_it_fails(out, method.label):
            (found[method],) = lab.measure(method, "confirm", tail=tail)
    return found


def refuse_unmeasured(left: Mapping[str, str]) -> None:
    """Plain decoding is no answer where nothing that was tried runs, as something is wrong with the
    engine, not with speculating; nor where there was no time to try anything.

    Args:
        left: method or setting → why it is left out.
    Raises:
        DraftwellError: some failed (`no_method_runs`), or all had no time (`no_time`).
    """
    reasons = [f"{name}, {why}" for name, why in left.items() if why != NO_TIME]
    if reasons:
        raise DraftwellError(
            f"nothing runs of all that was tried ({'; '.join(reasons)}): fix what the first one "
            "names, or name other methods with --set methods=…",
            code="no_method_runs",
        )
    if left:
        raise DraftwellError(
            "nothing was chosen, because the time ended before any way to speculate was measured: "
            "allow more minutes, or fewer prompts and tokens",
            code="no_time",
        )
