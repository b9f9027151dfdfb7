"""Which of two settings is faster, beside each other.

A figure beside plain decoding carries the noise of plain decoding, and of the minutes in which it
was measured. Two settings that such figures do not distinguish are therefore measured once more,
group by group in turn, and only this measurement decides between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from draftwell.components.bench.engines.figures import Figure, figure_of
from draftwell.components.engines.vllm_methods import Method
from draftwell.components.tune.engines.budget import NO_TIME
from draftwell.components.tune.engines.by_load import Finalist, load_engines
from draftwell.components.tune.engines.choice import Final
from draftwell.components.tune.engines.lab import Lab, left_out_if_it_fails
from draftwell.components.tune.engines.settings import EngineTuneSettings
from draftwell.serving.errors import DraftwellError


def play_finals(
    lab: Lab,
    settings: EngineTuneSettings,
    finalists: Sequence[Finalist],
    confirmed: Mapping[Method, Figure],
    out: dict[str, str],
) -> tuple[list[Finalist], list[Final]]:
    """Let the fastest defend its place against each of the others whose interval reaches its own;
    the winner of each meets the next.

    Only the times are new, not the prompts. The faster one wins however little it leads: where
    neither surely does, either will do.

    Args:
        finalists: all surely faster than plain decoding, the fastest first.
        out: gets what fails, and what there was no time for: other loads come first.
    Returns:
        the same finalists, each before those that it has beaten, and what was measured.
    """
    ranked: list[Finalist] = list(finalists[:1])
    played: list[Final] = []
    loads = load_engines(lab, settings)
    for method, reason in finalists[1:]:
        own, why = ranked[0]
        ranked.append((method, reason))
        if confirmed[method].high < confirmed[own].low:
            continue
        name = f"{method.label} beside {own.label}"
        if not lab.has_between(own, method, "final") and not lab.budget.allows(
            [(1, 2 * len(lab.prompts))], [], [], *loads
        ):
            out[name] = NO_TIME
            continue
        with left_out_if_there_is_no_room(out, name), left_out_if_it_fails(out, name):
            played.append(final := final_of(lab, own, method, "final"))
            if final.winner == method.label:
                ranked = [(method, f"{reason}; {final}"), *ranked[:-1]]
            else:
                ranked[0] = (own, f"{why}; {final}")
    return ranked, played


@contextmanager
def left_out_if_there_is_no_room(out: dict[str, str], name: str) -> Iterator[None]:
    """A final is the only time that two ways to speculate are up at once: where memory does not
    suffice for both, there is none."""
    try:
        yield
    except DraftwellError as error:
        if error.code not in ("engine_killed", "engine_out_of_memory"):
            raise
        out[name] = str(error)


def final_of(lab: Lab, one: Method, two: Method, stage: str) -> Final:
    """Two settings beside each other on all prompts.

    Raises:
        MethodFails: the engine fails with one of them.
    """
    figure = figure_of(two.label, lab.between(one, two, stage))
    if figure.ratio > 1:
        return Final(
            winner=two.label, loser=one.label, ratio=figure.ratio, low=figure.low, high=figure.high
        )
    return Final(
        winner=one.label,
        loser=two.label,
        ratio=1 / figure.ratio,
        low=1 / figure.high,
        high=1 / figure.low,
    )
