"""Fewer quick cases of tests that run over every strategy: what is independent of each other is
varied together there, and the other combinations are left to the slow tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def in_turn(names: Iterable[Any], *values: Sequence[Any], start: int = 0) -> list[Any]:
    """Each name with every combination of the values, of which all but one are slow: another one
    for each name, and from round to round shifted, so that names that take turns themselves (a
    strategy's roles) meet all of them.

    Args:
        start: number of the first name's quick combination.

    >>> quick = [case.values for case in in_turn(["a", "b", "c"], [0, 1]) if not case.marks]
    >>> quick
    [('a', 0), ('b', 1), ('c', 1)]
    """
    combinations = list(product(*values))
    cases = []
    for number, name in enumerate(names, start):
        chosen = (number + number // len(combinations)) % len(combinations)
        first = name if isinstance(name, tuple) else (name,)
        cases += [
            pytest.param(*first, *combination, marks=[] if at == chosen else [pytest.mark.slow])
            for at, combination in enumerate(combinations)
        ]
    return cases


def quick_only(cases: Iterable[tuple[Any, ...]], *quick: Any) -> list[Any]:
    """The cases, of which all are slow but those whose first values are given.

    >>> [bool(case.marks) for case in quick_only([("a", 0), ("b", 0), ("b", 1)], "a", ("b", 1))]
    [False, True, False]
    """
    starts = [one if isinstance(one, tuple) else (one,) for one in quick]
    return [
        pytest.param(
            *case,
            marks=[] if any(case[: len(one)] == one for one in starts) else [pytest.mark.slow],
        )
        for case in cases
    ]


def first_of_each(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The cases, of which all but the first of each name, which stands at the beginning, are slow.

    >>> [bool(case.marks) for case in first_of_each([("a", 0), ("a", 1), ("b", 0)])]
    [False, True, False]
    """
    known: set[Any] = set()
    chosen = []
    for case in cases:
        chosen.append(pytest.param(*case, marks=[pytest.mark.slow] if case[0] in known else []))
        known.add(case[0])
    return chosen
