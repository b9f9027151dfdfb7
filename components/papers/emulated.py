"""What the summary shows of runs on emulated devices, which `components/emulation` makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftwell.components.papers.estimates import Estimate


@dataclass(frozen=True)
class EmulatedGain:
    """One strategy's speed over another's, on devices of their own.

    Args:
        cost: a draft pass over a target pass.
        acceptance: of vanilla SD's draft tokens.
        ours: how many times as fast it is as the other.
        predicted: the same by the formulas.
    """

    strategy: str
    over: str
    cost: float
    acceptance: float
    ours: Estimate
    predicted: float
    prompts: int
    max_tokens: int


def gains_of(found: Iterable[EmulatedGain], strategy: str, over: str) -> Sequence[EmulatedGain]:
    """Those of one comparison, the cheapest draft first."""
    mine = [one for one in found if (one.strategy, one.over) == (strategy, over)]
    return sorted(mine, key=lambda one: one.cost)
