"""Draft lengths by load: at each measured level the fastest one, or 0 where nothing is surely
faster than plain decoding. What 0 costs is measured later (`by_load`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.engines.port import Message
from draftwell.components.engines.vllm_methods import Schedule
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


def schedule_of(levels: Sequence[Level]) -> Schedule:
    """(first, last, k) for loads up to the highest level; vLLM keeps the last one beyond.

    Between two levels the length of the higher one holds: drafts pay less the more requests there
    are, so that is the careful side.

    >>> schedule_of(
    ...     [
    ...         Level(at_once=1, k=5, open=(5,)),
    ...         Level(at_once=4, k=3, open=(3,)),
    ...         Level(at_once=16, k=0, open=(0,)),
    ...     ]
    ... )
    ((1, 1, 5), (2, 4, 3), (5, 16, 0))
    """
    parts: list[tuple[int, int, int]] = []
    for level in levels:
        first = parts[-1][1] + 1 if parts else 1
        if parts and parts[-1][2] == level.k:
            parts[-1] = (parts[-1][0], level.at_once, level.k)
        else:
            parts.append((first, level.at_once, level.k))
    return tuple(parts)
