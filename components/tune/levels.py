"""Draft lengths by load, for every engine: at each measured level the fastest one, or 0 where
nothing is surely faster than plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.engines.port import Message
from draftwell.components.report.intervals import FEWEST_PROMPTS


class Level(Message):
    """What was found at one load.

    Args:
        k: draft tokens; 0: nothing is drafted.
        open: all lengths that the measurement leaves open, 0 among them where nothing is surely
            faster than plain decoding.
    """

    at_once: int = Field(ge=1)
    k: int = Field(ge=0)
    open: tuple[int, ...] = Field(strict=False)


def level_of(at_once: int, figures: Mapping[int, Figure]) -> Level:
    """The length for one load; fewer distinct prompts than `FEWEST_PROMPTS` choose none.

    Args:
        figures: k → figure at this load, at least one.
    """
    fastest = max(figures, key=lambda k: figures[k].ratio)
    sure = [
        k
        for k, figure in figures.items()
        if figure.surely_faster and figure.prompts >= FEWEST_PROMPTS
    ]
    k = max(sure, key=lambda k: figures[k].ratio) if sure else 0
    left = {
        k
        for k, figure in figures.items()
        if figure.high >= figures[fastest].ratio and not figure.surely_slower
    }
    return Level(at_once=at_once, k=k, open=tuple(sorted(left | {k} | (set() if sure else {0}))))


def table_of(levels: Sequence[Level]) -> dict[int, int]:
    """`draft_length_by_batch`: requests at once → draft tokens."""
    return {level.at_once: level.k for level in levels}
