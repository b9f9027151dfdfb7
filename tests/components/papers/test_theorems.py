"""SPRINTER's theorems hold for a verifier whose mistakes are independent, and are not made to hold
for one whose mistakes are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftwell.components.papers.theorems import (
    compared,
    distances,
    expected_run,
    in_a_row,
    runs,
    stretches_of,
)
from draftwell.components.train.operating_points import ScoredTokens

PROMPTS, LENGTH = 200, 100
RANDOM = np.random.default_rng(0)


def tokens_of(kept: np.ndarray, accepted: np.ndarray, length: int = LENGTH) -> ScoredTokens:
    """Texts of some length, whose tokens are bad where the target may reject them."""
    place = np.arange(len(kept))
    bad = (accepted < 1).astype(np.float64)
    return ScoredTokens(kept.astype(float), place % length == 0, accepted, bad, place // length)


def drawn(eta_tp: float, eta_fp: float) -> ScoredTokens:
    """Tokens of a draft, with a verifier that knows nothing but whether they are good."""
    count = PROMPTS * LENGTH
    accepted = np.where(RANDOM.random(count) < 0.4, RANDOM.random(count), 1.0)
    chance = np.where(accepted < 1, eta_fp, eta_tp)
    return tokens_of(RANDOM.random(count) < chance, accepted)


def test_eq_3_is_the_mean_of_theorem_3_3s_law() -> None:
    for eta_tp, eta_fp, r in ((0.9, 0.3, 5), (0.2, 0.8, 0), (1.0, 0.5, 3)):
        i = np.arange(2000)
        below, above = eta_tp**i * (1 - eta_tp), eta_tp**r * eta_fp ** (i - r) * (1 - eta_fp)
        law = np.where(i < r, below, above)
        assert law.sum() == pytest.approx(1)
        assert expected_run(eta_tp, eta_fp, np.array(r)) == pytest.approx((i * law).sum())


@pytest.mark.parametrize(("eta_tp", "eta_fp"), [(0.8, 0.2), (0.6, 0.5), (1.0, 0.1)])
def test_independent_mistakes_are_as_far_as_theorem_3_1_says(eta_tp: float, eta_fp: float) -> None:
    tokens = drawn(eta_tp, eta_fp)
    found = distances(tokens, 0.5)
    assert found.low < 1 < found.high
    assert found.ratio == pytest.approx(1, abs=0.04)
    assert runs(tokens, 0.5).low > 1, "good tokens come behind bad ones, too"


def test_theorem_3_3_is_right_where_all_behind_a_bad_token_is_bad() -> None:
    good = RANDOM.integers(0, 30, PROMPTS)
    accepted = np.where(np.arange(LENGTH) < good[:, None], 1.0, 0.5).reshape(-1)
    kept = RANDOM.random(PROMPTS * LENGTH) < np.where(accepted < 1, 0.3, 0.9)
    found = runs(tokens_of(kept, accepted), 0.5)
    assert found.low < 1 < found.high
    assert found.ratio == pytest.approx(1, abs=0.04)


def test_a_verifier_that_lets_the_mildest_pass_is_nearer_than_theorem_3_1_says() -> None:
    accepted = drawn(0.5, 0.5).accepted
    found = distances(tokens_of(accepted > 0.5, accepted), 0.5)
    assert found.ratio < 0.6
    assert found.high < 1


def test_stretches_begin_behind_what_is_not_trusted_and_end_within_a_text() -> None:
    kept = np.array([1, 0, 1, 1, 0, 1, 1, 0, 0, 1], bool)
    accepted = np.array([1, 1, 1, 0, 1, 1, 0, 1, 1, 1], float)
    found = stretches_of(tokens_of(kept, accepted, length=5), 0.5)
    assert found.trusted.tolist() == [1, 2, 2, 0, 1]
    assert found.acceptable.tolist() == [3, 1, 1, 2, 1]
    assert found.room.tolist() == [5, 3, 5, 2, 1]
    assert found.prompt.tolist() == [0, 0, 1, 1, 1]


def test_rows_are_compared_by_their_means() -> None:
    found: Any = compared(np.array([0, 0, 1]), np.array([1, 2, 3]), np.array([2, 2, 2]))
    assert (found.measured, found.predicted, found.ratio) == (2, 2, 1)
    assert in_a_row(np.array([], bool)).tolist() == []
