"""The test behind every alarm: looks without end, windows that are alike in time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftwell.components.watch.evidence import Normal, episodes
from tests.support.watch.simulator import ar1

LIMIT = 0.08
NORMAL = Normal(mean=0.0, spread=0.05, low=-0.1, high=0.1, windows=10**6)


def test_the_permitted_rate_holds_at_every_look() -> None:
    # the null's edge, which is the worst of it: half the limit worse on average
    rng = np.random.default_rng(0)
    alpha, windows, runs = 1e-3, 100, 1000
    alarms = sum(
        bool(
            episodes(rng.normal(LIMIT / 2, 0.05, windows).tolist(), NORMAL, LIMIT, -math.log(alpha))
        )
        for _ in range(runs)
    )
    assert alarms <= runs * alpha * windows
    naive = sum(bool((np.abs(rng.normal(0, 1, windows)) > 3.29).any()) for _ in range(runs))
    assert naive > 0.08 * runs


def test_from_a_known_beginning_alpha_is_that_of_all_windows() -> None:
    rng = np.random.default_rng(1)
    alarms = sum(
        bool(
            episodes(
                rng.normal(LIMIT / 2, 0.05, 100).tolist(),
                NORMAL,
                LIMIT,
                math.log(100),
                from_first=True,
            )
        )
        for _ in range(1000)
    )
    assert alarms <= 10


def test_windows_that_are_alike_in_time_have_a_larger_spread() -> None:
    rng = np.random.default_rng(2)
    truth = math.sqrt((1 + 0.8) / (1 - 0.8))
    found = [Normal.of(ar1(rng, 120, 0.8).tolist()).spread for _ in range(200)]
    # a spread that takes windows for independent is 1, a third of the truth
    assert np.mean(np.array(found) > truth) > 0.7
    assert np.median(found) < 2 * truth


def test_a_shift_is_found_where_it_began_and_ends() -> None:
    rng = np.random.default_rng(3)
    effects = rng.normal(0, 0.03, 200)
    effects[80:140] += 0.2
    (found,) = episodes(effects.tolist(), NORMAL, LIMIT, 12.0)
    assert 78 <= found.since <= 81
    assert found.seen <= 88
    assert found.until is not None
    assert 145 <= found.until <= 160
    assert found.p < 0.01


def test_a_real_change_below_the_limit_is_no_alarm() -> None:
    rng = np.random.default_rng(4)
    sharp = NORMAL.model_copy(update={"spread": 0.01})
    assert episodes(rng.normal(0.06, 0.01, 300).tolist(), sharp, LIMIT, 12.0) == []


@pytest.mark.parametrize("size", [0.5, 50.0])
def test_one_odd_window_is_no_alarm(size: float) -> None:
    effects = [0.0] * 50
    effects[25] = size
    assert episodes(effects, NORMAL, LIMIT, 12.0) == []
