"""Fewer cases of tests that run over every strategy: what is independent of each other is varied together, and repetition is left to the
slow tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, product
from typing import Any

import pytest


def in_turn(names: Iterable[Any], *values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each name with one combination of the values, one combination after another.

    >>> in_turn(["a", "b", "c"], [0, 1])
    [('a', 0), ('b', 1), ('c', 0)]
    """
    combinations = cycle(list(product(*values)))
    return [(*(name if isinstance(name, tuple) else (name,)), *next(combinations)) for name in names]


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
