"""Figures by category of prompts: means, the macro average, and what an interval is known of."""

from __future__ import annotations

from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.bench.categories import ALL, Drafts, category_figures, category_of


def side(*seconds: float) -> Any:
    return SimpleNamespace(seconds=list(seconds), tokens=[10] * len(seconds))


def figures(names: str, plain: Any, other: Any, rounds: list[int], accepted: list[int]) -> Any:
    made = category_figures(names.split(), plain, other, Drafts(rounds, accepted))
    return {one.category: one for one in made}


def test_every_category_weighs_the_same() -> None:
    """Three prompts of one and one of the other: the mean over prompts would be 2.25."""
    found = figures("a a a b", side(1, 1, 1, 4), side(1, 1, 1, 1), [10] * 4, [10, 10, 10, 20])
    assert [found[name].acceptance_length for name in ("a", "b", ALL)] == [2.0, 3.0, 2.5]
    assert [found[name].speedup for name in ("a", "b", ALL)] == pytest.approx([1, 4, 2])
    assert found[ALL].prompts == 4


def test_a_prompt_counts_once_however_many_rounds_it_took() -> None:
    """As SPEED-Bench means it: over rounds it would be 2.8."""
    found = figures("a a b", side(1, 1, 1), side(1, 1, 1), [90, 10, 1], [180, 0, 1])
    assert found["a"].acceptance_length == pytest.approx(2.0)


def test_the_interval_is_students_t_over_prompts() -> None:
    accepted = [10, 14, 12, 8]
    found = figures("a a a a b b", side(*[1] * 6), side(*[1] * 6), [10] * 6, [*accepted, 5, 5])
    lengths = [1 + one / 10 for one in accepted]
    reach = 2.3534 * stdev(lengths) / 2  # t of 3 degrees of freedom, 95 %
    assert found["a"].acceptance_low == pytest.approx(mean(lengths) - reach, abs=1e-4)
    assert found["a"].acceptance_high == pytest.approx(mean(lengths) + reach, abs=1e-4)


def test_one_prompt_has_no_interval_and_neither_has_a_mean_that_rests_on_it() -> None:
    found = figures("a a b", side(1, 2, 3), side(1, 1, 1), [10] * 3, [10, 12, 9])
    assert found["a"].speedup_low is not None
    for name in ("b", ALL):
        row = found[name]
        assert (row.speedup_low, row.acceptance_low, row.acceptance_high) == (None, None, None)


def test_without_drafts_there_is_no_length_and_one_category_is_no_table() -> None:
    found = figures("a a b b", side(*[1] * 4), side(*[1] * 4), [0] * 4, [0] * 4)
    assert found["a"].acceptance_length is found[ALL].acceptance_length is None
    assert figures("a a", side(1, 1), side(1, 1), [1, 1], [1, 1]) == {}


def test_throughput_splits_are_told_apart_by_length() -> None:
    tokens = {200: "256", 1300: "1k", 2600: "2k", 10_000: "8k", 20_000: "16k", 40_000: "32k"}
    assert [category_of("low_entropy", count) for count in tokens] == [
        f"{name} low_entropy" for name in tokens.values()
    ]
    assert category_of("math", 1300) == "math"
