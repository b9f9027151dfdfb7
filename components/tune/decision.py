"""The decision, for every engine: the fastest contender that keeps to the constraints and is surely
faster than plain decoding, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from draftwell.components.report.intervals import FEWEST_PROMPTS

T = TypeVar("T")


@dataclass(frozen=True)
class Contender(Generic[T]):
    """A setting beside plain decoding, as the measurement that decides saw it.

    Args:
        ratio, low: times as fast as plain decoding, and the lower end of the interval.
        prompts: distinct ones that were measured on.
        objection: the constraint that it breaks.
    """

    setting: T
    label: str
    ratio: float
    low: float
    prompts: int
    objection: str | None = None

    @property
    def choosable(self) -> bool:
        """Whether it may be chosen: a lower bound above 1, on enough prompts, and no objection."""
        return self.low > 1.0 and self.prompts >= FEWEST_PROMPTS and self.objection is None


def choosable(contenders: Sequence[Contender[T]]) -> list[Contender[T]]:
    """Those that may be chosen, the fastest first."""
    return [one for one in fastest_first(contenders) if one.choosable]


def why_chosen(chosen: Contender[T], plain: str, tail: float) -> str:
    """Why a contender is chosen; `tail` is that of its interval."""
    return (
        f"{chosen.label} is {chosen.ratio:.2f} times as fast as {plain} (at least "
        f"{chosen.low:.2f} times, one-sided {100 * (1 - tail):.1f} %)"
    )


def why_plain(contenders: Sequence[Contender[T]], plain: str) -> str:
    """Why plain decoding stays: none of the contenders may be chosen."""
    ranked = fastest_first(contenders)
    fitting = [one for one in ranked if one.objection is None]
    if not ranked:
        return f"{plain}, because there was nothing to compare it with"
    if not fitting:
        return (
            f"{plain}, because nothing keeps to the constraints: {ranked[0].label} does not, "
            f"{ranked[0].objection}"
        )
    best = fitting[0]
    if best.prompts < FEWEST_PROMPTS:
        return (
            f"{plain}, because {best.prompts} prompts are too few to choose anything else: "
            f"measure on at least {FEWEST_PROMPTS}; the best there, {best.label}, was "
            f"{best.ratio:.2f} times as fast"
        )
    return (
        f"{plain}, because nothing is surely faster: the best, {best.label}, measured "
        f"{best.ratio:.2f} times its speed with a lower bound of {best.low:.2f}"
    )


def fastest_first(contenders: Sequence[Contender[T]]) -> list[Contender[T]]:
    """By ratio, descending; of equal ones the order stays."""
    return sorted(contenders, key=lambda one: -one.ratio)
