"""The paired bootstrap: pairing, direction, one-sided bounds and refusals."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from draftwell.components.report.intervals import (
    bootstrap_of_sums,
    expanded_tail,
    paired_bootstrap_ratio,
    percentile_ends,
    ratio_of,
    resample,
    resamples_for,
)
from tests.support.errors import raises_code


def test_constant_advantage_has_no_width_although_prompts_differ_hundredfold() -> None:
    seconds, tokens = [0.1, 10.0, 3.0, 0.7], [4, 64, 30, 9]
    ratio, low, high = paired_bootstrap_ratio(seconds, tokens, [s / 1.5 for s in seconds], tokens)
    assert ratio == pytest.approx(1.5)
    # an unpaired bootstrap would give a wide interval
    assert (low, high) == pytest.approx((1.5, 1.5))


def test_seconds_per_token_decide_not_seconds() -> None:
    ratio, _, _ = paired_bootstrap_ratio([1.0, 1.0], [10, 10], [1.0, 1.0], [5, 5])
    assert ratio == pytest.approx(0.5)


def test_small_advantage_in_noise_straddles_one() -> None:
    rng = random.Random(1)
    a = [1.0 + rng.uniform(-0.3, 0.3) for _ in range(12)]
    b = [1.0 / 1.03 + rng.uniform(-0.3, 0.3) for _ in range(12)]
    _, low, high = paired_bootstrap_ratio(a, [10] * 12, b, [10] * 12)
    assert low < 1.0 < high


def test_bounds_are_one_sided_at_the_given_level() -> None:
    rng = random.Random(2)
    a, b = ([rng.uniform(0.5, 1.5) for _ in range(20)] for _ in range(2))
    narrow = paired_bootstrap_ratio(a, [8] * 20, b, [8] * 20, tail=0.25)
    wide = paired_bootstrap_ratio(a, [8] * 20, b, [8] * 20, tail=0.01)
    assert wide[1] < narrow[1] < narrow[0] < narrow[2] < wide[2]
    assert wide == paired_bootstrap_ratio(a, [8] * 20, b, [8] * 20, tail=0.01)


def test_an_expanded_tail_holds_with_few_prompts() -> None:
    """Prompts vary by a normal law about no advantage: a bound of 5 % lies above the truth in 6 %
    of studies, not in 9 %."""
    prompts, studies, rng = 8, 1500, np.random.default_rng(3)
    seconds = np.exp(rng.normal(0, 0.1, (2, studies, prompts)))

    def share_above_one(tail: float) -> float:
        bounds = [
            paired_bootstrap_ratio(
                one, [8] * prompts, other, [8] * prompts, tail=tail, resamples=1000
            )[1]
            for one, other in zip(*seconds.tolist(), strict=True)
        ]
        return sum(bound > 1 for bound in bounds) / studies

    assert share_above_one(expanded_tail(0.05, prompts)) <= 0.065
    assert share_above_one(0.05) >= 0.08


def test_a_far_tail_does_not_hang_on_a_handful_of_resamples() -> None:
    """A fourth of 5 % on eight prompts, expanded: of 2,000 resamples two or three lay beyond the
    bound."""
    rng = np.random.default_rng(4)
    seconds = np.exp(rng.normal(0, 0.2, (2, 8))).tolist()
    tail = expanded_tail(0.05 / 4, 8)

    def spread(resamples: int | None) -> float:
        return float(
            np.std(
                [
                    paired_bootstrap_ratio(
                        seconds[0],
                        [8] * 8,
                        seconds[1],
                        [8] * 8,
                        tail=tail,
                        resamples=resamples,
                        seed=seed,
                    )[1]
                    for seed in range(20)
                ]
            )
        )

    assert 2000 * tail < 4
    assert resamples_for(tail, 8) * tail >= 30
    assert spread(None) < 0.5 * spread(2000)


def test_resamples_are_as_many_as_the_tail_needs_and_no_more() -> None:
    assert resamples_for(0.05, 40) == 2000
    assert resamples_for(expanded_tail(0.05, 2), 2) == 2000, (
        "of two prompts there are four resamples"
    )
    for prompts in range(2, 40):
        tail = expanded_tail(0.05 / 3, prompts)
        resamples = resamples_for(tail, prompts)
        assert 2000 <= resamples <= 200_000
        assert resamples * max(tail, prompts**-prompts) >= 30, prompts


def test_an_expanded_tail_is_narrower_and_ends_where_prompts_are_many() -> None:
    tails = [expanded_tail(0.05, prompts) for prompts in (2, 3, 5, 8, 12, 40, 100_000)]
    assert tails == sorted(tails)
    assert tails[3] == pytest.approx(0.0214, abs=5e-4)
    assert tails[-1] == pytest.approx(0.05, abs=1e-4)
    assert expanded_tail(0.05, 1) == 0.05


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (([], [], [], []), "no_prompts"),
        (([1.0], [1], [1.0, 2.0], [1, 1]), "unpaired_prompts"),
        (([1.0], [0], [1.0], [1]), "not_positive"),
        (([float("nan")], [1], [1.0], [1]), "not_positive"),
    ],
)
def test_bad_measurements_are_refused(arguments: tuple[list[float], ...], code: str) -> None:
    with raises_code(code):
        paired_bootstrap_ratio(*arguments)  # type: ignore[arg-type]


def test_one_bootstrap_draws_the_prompts_of_all_intervals():
    """Indices and counts repeat for a seed; ends leave out NaN and are NaN where nothing else is
    left."""
    picked = resample(5, 40, seed=3)
    rng = np.random.default_rng(3)
    assert (picked == [rng.integers(0, 5, 5) for _ in range(40)]).all()
    counts = resample(5, 40, seed=3, counts=True)
    assert (counts.sum(-1) == 5).all()
    assert (counts == resample(5, 40, seed=3, counts=True)).all()
    values = np.array([[1.0, np.nan, 4.0], [2.0, np.nan, np.nan], [3.0, np.nan, 6.0]])
    assert np.array_equal(percentile_ends(values, 0.5), [[2.0, np.nan, 5.0]] * 2, equal_nan=True)
    sums = np.array([[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]])
    low, high = bootstrap_of_sums(
        sums, lambda drawn: drawn[:, :1] / drawn[:, 1:], resamples=500, seed=1
    )
    assert 0 <= low[0] < 4 / 7 < high[0] <= 0.75


@dataclass
class Decoded:
    """Seconds and tokens of each prompt."""

    seconds: list[float]
    tokens: list[int]


def test_few_prompts_widen_the_one_interval():
    base, other = Decoded([2.0, 3.0, 4.0], [10, 10, 10]), Decoded([1.0, 2.0, 3.0], [10, 10, 10])
    raw = paired_bootstrap_ratio(base.seconds, base.tokens, other.seconds, other.tokens)
    found = ratio_of(base, other)
    assert found.ratio == raw[0] == pytest.approx(1.5)
    assert found.low < raw[1]
    assert found.high > raw[2]
    same = Decoded([2.0, 3.0], [10, 10])
    assert ratio_of(same, same) == (1.0, 1.0, 1.0)
