"""Successive halving, for every engine: many settings on few prompts, then fewer on more (Jamieson
& Talwalkar 2016). What a rung measures, and who stays, is the engine's; whoever is left is measured
again before anything is decided (`decision`), because the best of a rung was partly lucky."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")
Rung = Callable[[Sequence[T], int, int], Sequence[T]]
"""Measures entrants on the prompts from a first to a last (exclusive), and returns who stays, the
best first."""


def halve(
    rung: Rung[T], entrants: Sequence[T], prompts: int, *, first: int, finalists: int
) -> list[T]:
    """Who is left to be confirmed.

    Args:
        prompts: how many there are; no rung sees those of another.
        first: prompts of the first rung; each further one takes as many new ones as all before it
            together.
        finalists: so many need no rung.

    >>> halve(
    ...     lambda names, start, end: sorted(names)[: len(names) // 2],
    ...     "dacb",
    ...     8,
    ...     first=2,
    ...     finalists=1,
    ... )
    ['a']
    """
    survivors, start = list(entrants), 0
    while len(survivors) > finalists and start < prompts:
        end = min(prompts, max(first, 2 * start))
        survivors, start = list(rung(survivors, start, end)), end
    return survivors[:finalists]


def best_of_each(ranked: Sequence[T], kind: Callable[[T], Hashable], count: int) -> list[T]:
    """The best of every kind, then the next best of any: `count` of them at most.

    Args:
        ranked: the best first.

    >>> best_of_each(["a2", "a1", "b1", "c1"], lambda name: name[0], 3)
    ['a2', 'b1', 'c1']
    """
    best: dict[Hashable, T] = {}
    for one in ranked:
        best.setdefault(kind(one), one)
    first = list(best.values())
    return [*first, *(one for one in ranked if one not in first)][:count]
