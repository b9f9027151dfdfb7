"""The Pareto front against its definition, tried out pair by pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwell.components.tune.pareto import front
from tests.support.errors import raises_code

# few values, so that ties in one objective, and in all of them, are common
VALUES = st.integers(0, 4).map(float)


@given(st.lists(st.tuples(VALUES, VALUES, VALUES), max_size=14))
def test_front_against_brute_force(points: list[tuple[float, float, float]]) -> None:
    found = set(front(points))
    for i, point in enumerate(points):
        beaten = False
        for other in points:
            no_worse = other[0] <= point[0] and other[1] <= point[1] and other[2] <= point[2]
            better = other[0] < point[0] or other[1] < point[1] or other[2] < point[2]
            beaten = beaten or (no_worse and better)
        assert (i in found) is not beaten
    assert list(front(points)) == sorted(found)


def test_equal_points_stay_together_and_one_objective_is_a_minimum() -> None:
    assert front([(1.0, 1.0, 0.0), (1.0, 1.0, 0.0), (1.0, 2.0, 0.0)]) == [0, 1]
    assert front([(3.0,), (1.0,), (2.0,)]) == [1]
    assert front([]) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(bad: float) -> None:
    with raises_code("measurement_not_finite"):
        front([(1.0, 1.0), (bad, 0.5)])
