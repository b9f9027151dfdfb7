"""The search: every way on a few prompts, the best on all of them, then lengths by load. Plain
decoding is always among them, and is chosen unless another way is surely faster, at all loads
(`by_load`). Where time is short (`Lab.budget`), what promises most is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from draftwell.components.bench.engines.figures import TAIL, Figure, figure_of
from draftwell.components.bench.engines.measure import Beside
from draftwell.components.engines.vllm_methods import OFF, Method
from draftwell.components.report.intervals import FEWEST_PROMPTS
from draftwell.components.tune.engines.budget import NO_TIME
from draftwell.components.tune.engines.by_load import Finalist, choose_by_load, load_engines
from draftwell.components.tune.engines.candidates import candidates, first_ngram, left_out
from draftwell.components.tune.engines.choice import EngineChoice, Final
from draftwell.components.tune.engines.final import (
    final_of,
    left_out_if_there_is_no_room,
    play_finals,
)
from draftwell.components.tune.engines.lab import Lab, left_out_if_it_fails
from draftwell.components.tune.engines.ngram_replay import Text
from draftwell.components.tune.engines.settings import EngineTuneSettings
from draftwell.serving.errors import DraftwellError


def tune_engine(
    lab: Lab,
    settings: EngineTuneSettings,
    lacks: Callable[[str], bool] = lambda package: False,
    texts: Sequence[Text] | None = None,
) -> EngineChoice:
    """Choose how an engine speculates, by running it.

    Args:
        lab: with as many slots as the highest level.
        lacks: whether a distribution is missing in the engine's environment.
        texts: greedy texts of the target, which decide which n-grams are looked up; None: those of
            the first measurement do.
    Raises:
        DraftwellError: what engines raise, but for what only one way to speculate fails with; every
            one that was tried fails (`no_method_runs`). What was finished is in the lab's store.
    """
    lacking = left_out(settings, lab.files, lacks)
    out = dict(lacking)
    with lab.open():
        explored = explore(
            lab,
            settings,
            [name for name in settings.methods if name not in out and name != OFF],
            out,
            texts,
        )
        first = sorted(explored, key=lambda method: -explored[method].ratio)[: settings.confirm]
        # the first may all be lengths of one method, whose price at other loads they share
        further = best_of_others(explored, first) if len(settings.levels) > 1 else []
        tail, tries = (
            TAIL / max(1, len(first) + len(further)),
            len({method.name for method in (*first, *further)}),
        )
        confirmed = confirm(lab, first, out, tail)
        if not confirmed and not further:
            refuse_if_all_failed(
                {name: why for name, why in out.items() if name not in lacking and why != NO_TIME}
            )
        found = EngineChoice(
            method=OFF,
            k=0,
            n=0,
            reason=why_plain(confirmed),
            explored=tuple(explored.values()),
            left_out=out,
        )
        found = choose(lab, settings, confirmed, found, tries)
        if found.method == OFF and further:
            loads = load_engines(lab, settings)
            more = confirm(lab, further, out := dict(found.left_out), tail, loads)
            if not confirmed and not more:
                refuse_if_all_failed(
                    {
                        name: why
                        for name, why in out.items()
                        if name not in lacking and why != NO_TIME
                    }
                )
            found = choose(
                lab,
                settings,
                more,
                found.model_copy(update={"left_out": out}),
                tries,
                before=found.reason,
            )
        return found


def best_of_others(explored: Mapping[Method, Figure], first: Sequence[Method]) -> list[Method]:
    """The best length of every method without one among the first, unless it is surely slower than
    plain decoding; the fastest first."""
    names = {method.name for method in first}
    best: dict[str, Method] = {}
    for method in sorted(explored, key=lambda method: -explored[method].ratio):
        if method.name not in names and not explored[method].surely_slower:
            best.setdefault(method.name, method)
    return list(best.values())


def confirm(
    lab: Lab,
    methods: Sequence[Method],
    out: dict[str, str],
    tail: float,
    loads: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> dict[Method, Figure]:
    """Measure ways on all prompts.

    Args:
        out: gets what fails, and what there was no time for.
        loads: engines that a way has to be measured with afterwards to be of use; None: none, and
            the first is measured in any case.
    """
    found: dict[Method, Figure] = {}
    for method in methods:
        late = not lab.has(method, "confirm") and not lab.budget.allows(
            [(1, len(lab.prompts))], *(loads or ())
        )
        if late and (found or loads):
            out[method.label] = NO_TIME
            continue
        with left_out_if_it_fails(out, method.label):
            (found[method],) = lab.measure(method, "confirm", tail=tail)
    return found


def choose(
    lab: Lab,
    settings: EngineTuneSettings,
    confirmed: Mapping[Method, Figure],
    found: EngineChoice,
    tries: int,
    before: str = "",
) -> EngineChoice:
    """The fastest of what was confirmed, at all loads, or plain decoding.

    Args:
        found: plain decoding, with all that was measured and chosen among before.
        tries: methods that are tried at other loads at most, these and others.
        before: why plain decoding was to be chosen without these; empty: nothing was tried before.
    """
    out = dict(found.left_out)
    finalists, finals = play_finals(lab, settings, sure(confirmed), confirmed, out)
    found = found.model_copy(
        update={
            "confirmed": (*found.confirmed, *confirmed.values()),
            "finals": (*found.finals, *finals),
            "left_out": out,
        }
    )
    if before:
        out |= {
            figure.label: (
                f"it is not surely faster than plain decoding (at least {figure.low:.2f} times)"
            )
            for figure in confirmed.values()
            if not figure.surely_faster
        }
    if not finalists:
        return found
    if len(settings.levels) > 1:
        return choose_by_load(lab, settings, finalists, found, tries, before)
    winner, reason = finalists[0]
    return found.model_copy(
        update={"method": winner.name, "k": winner.k, "n": winner.n, "reason": reason}
    )


def refuse_if_all_failed(failed: Mapping[str, str]) -> None:
    """Plain decoding is no answer where nothing that was tried runs: something is wrong with the
    engine, not with speculating.

    Args:
        failed: method or setting → why.
    Raises:
        DraftwellError: there are some (`no_method_runs`).
    """
    if failed:
        reasons = "; ".join(f"{name}, {why}" for name, why in failed.items())
        raise DraftwellError(
            f"nothing runs of all that was tried ({reasons}): fix what the first one "
            "names, or name other methods with "
            "--methods",
            code="no_method_runs",
        )


def explore(
    lab: Lab,
    settings: EngineTuneSettings,
    names: Sequence[str],
    out: dict[str, str],
    texts: Sequence[Text] | None,
) -> dict[Method, Figure]:
    """Measure every way on a few prompts: the middle length of each method, then the other lengths,
    those of the fastest method first.

    Args:
        out: gets what fails, and what there was no time for.
    """
    found: dict[Method, Figure] = {}
    others: dict[Method, list[Method]] = {}
    to_come = [[(1, len(lab.prompts))]] * settings.confirm

    def measure(name: str, method: Method) -> None:
        """`name` is what is left out where it fails: the method, or one of its lengths."""
        if not lab.has(method, "explore") and not lab.budget.allows(
            [(1, settings.explore)], *to_come
        ):
            out[method.label] = NO_TIME
            return
        with left_out_if_it_fails(out, name):
            found[method] = lab.measure(method, "explore", prompts=settings.explore)[0]

    for name in names:
        with left_out_if_it_fails(out, name):
            known = plain_texts(lab, settings) if name == "ngram" and texts is None else texts
            first, *rest = candidates([name], settings, known)
            measure(name, first)
            others[first] = rest
    for first in sorted(others, key=lambda one: -found[one].ratio if one in found else 0.0):
        for method in others[first] if first.name not in out else ():
            measure(method.label, method)
    return found


def grid_of(
    lab: Lab, settings: EngineTuneSettings, choice: EngineChoice, texts: Sequence[Text] | None
) -> tuple[dict[str, Beside], Final | None, dict[str, str]]:
    """All that a tuning chooses among, and the choice, measured again on all prompts, one request
    at a time.

    Nothing that the choice rests on is used: the best by luck would be among it. Nor do the lucky
    minutes of the grid say how much faster its best is than the choice: both are measured once
    more, beside each other. The prompts are the same.

    Returns:
        label → measurement; the choice and the fastest of the others beside each other, None where
        one of them does not run; and label → why of what failed.
    """
    found: dict[str, Beside] = {}
    methods: dict[str, Method] = {OFF: Method()}
    final: Final | None = None
    failed: dict[str, str] = {}

    def measure(method: Method) -> None:
        with left_out_if_it_fails(failed, method.label):
            lab.measure(method, "grid")
            found[method.label] = lab.found(method, "grid")
            methods[method.label] = method

    own = choice.alone
    with lab.open():
        if own.name != OFF:
            measure(own)
        for name in settings.methods:
            if name in choice.left_out or name == OFF:
                continue
            with left_out_if_it_fails(failed, name):
                known = plain_texts(lab, settings) if name == "ngram" and texts is None else texts
                for method in candidates([name], settings, known):
                    measure(method)
        if own.label in methods and len(methods) > 1:
            speeds = {
                OFF: 1.0,
                **{label: figure_of(label, beside).ratio for label, beside in found.items()},
            }
            rival = max(speeds.keys() - {own.label}, key=lambda label: speeds[label])
            name = f"{rival} beside {own.label}"
            with left_out_if_there_is_no_room(failed, name), left_out_if_it_fails(failed, name):
                final = final_of(lab, own, methods[rival], "grid final")
    return found, final, failed


def plain_texts(lab: Lab, settings: EngineTuneSettings) -> list[Text] | None:
    """Texts of plain decoding, from the first measurement; None for sampled requests, which texts
    predict nothing for."""
    if settings.temperature > 0:
        return None
    first = first_ngram(settings)
    lab.measure(first, "explore", prompts=settings.explore)
    outputs = lab.found(first, "explore").plain.outputs
    return [(prompt, output[0]) for prompt, output in zip(lab.prompts, outputs, strict=False)]


def why_plain(confirmed: Mapping[Method, Figure]) -> str:
    """Why nothing else is chosen, in a sentence."""
    if not confirmed:
        return "plain decoding, because there was nothing to compare it with"
    best, figure = max(confirmed.items(), key=lambda item: item[1].ratio)
    if figure.prompts < FEWEST_PROMPTS:
        return (
            f"plain decoding, because {figure.prompts} prompts are too few to choose "
            "anything else: measure on at least "
            f"{FEWEST_PROMPTS}; the best there, {best.label}, was {figure.ratio:.2f} times as fast"
        )
    return (
        f"plain decoding, because nothing is surely faster: the best, {best.label}, "
        f"measured {figure.ratio:.2f} times its "
        f"speed with a lower bound of {figure.low:.2f}"
    )


def sure(confirmed: Mapping[Method, Figure]) -> list[Finalist]:
    """All that are surely faster than plain decoding on enough prompts, the fastest first."""
    ranked = sorted(confirmed.items(), key=lambda item: -item[1].ratio)
    return [
        (
            method,
            (
                f"{method.label} is {one.ratio:.2f} times as fast as plain decoding (at least "
                f"{one.low:.2f} times)"
            ),
        )
        for method, one in ranked
        if one.surely_faster and one.prompts >= FEWEST_PROMPTS
    ]
