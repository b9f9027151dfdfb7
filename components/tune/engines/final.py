"""Which of two settings is faster, beside each other.

A figure beside plain decoding carries the noise of plain decoding, and of the minutes in which it was measured. Two settings that such
figures do not tell apart are therefore measured once more, group by group in turn, and only this measurement decides between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from components.bench.engines.figures import Figure, figure_of
from components.engines.vllm_methods import Method
from components.tune.engines.budget import NO_TIME
from components.tune.engines.by_load import Finalist
from components.tune.engines.choice import Final
from components.tune.engines.lab import Lab, left_out_if_it_fails


def play_finals(lab: Lab, finalists: Sequence[Finalist], confirmed: Mapping[Method, Figure],
                out: dict[str, str]) -> tuple[list[Finalist], list[Final]]:
    """Let the fastest defend its place against each of the others whose interval reaches its own; the winner of each meets the next.

    Args:
        finalists: all surely faster than plain decoding, the fastest first.
        out: gets what fails, and what there was no time for.
    Returns:
        the same finalists, the winner first, and what was measured.
    """
    if not finalists:
        return [], []
    played: list[Final] = []
    best = finalists[0]
    for other in finalists[1:]:
        own, rival = best[0], other[0]
        if confirmed[rival].high < confirmed[own].low:
            continue
        name = f"{rival.label} beside {own.label}"
        if not lab.has_between(own, rival, "final") and not lab.budget.allows([(1, 2 * len(lab.prompts))], []):
            out[name] = NO_TIME
            continue
        with left_out_if_it_fails(out, name):
            played.append(final := final_of(lab, own, rival, "final"))
            method, why = other if final.winner == rival.label else best
            best = method, f"{why}{words(final)}"
    return [best, *(one for one in finalists if one[0] != best[0])], played


def final_of(lab: Lab, one: Method, two: Method, stage: str) -> Final:
    """Two settings beside each other on all prompts.

    Raises:
        MethodFails: the engine fails with one of them.
    """
    figure = figure_of(two.label, lab.between(one, two, stage))
    if figure.ratio > 1:
        return Final(winner=two.label, loser=one.label, ratio=figure.ratio, low=figure.low, high=figure.high)
    return Final(winner=one.label, loser=two.label, ratio=1 / figure.ratio, low=1 / figure.high, high=1 / figure.low)


def words(final: Final) -> str:
    """What a final says of its winner.

    >>> words(Final(winner="a", loser="b", ratio=1.03, low=0.98, high=1.08))
    ', and 1.03 times as fast as b beside it (0.98 to 1.08)'
    """
    return f", and {final.ratio:.2f} times as fast as {final.loser} beside it ({final.low:.2f} to {final.high:.2f})"
