"""Rounded weights that are too coarse fail the gate, good ones pass, and what nobody limits is not
judged."""

from __future__ import annotations

import pytest

from draftwell.components.gate.weights_check import (
    judge_layers,
    judge_weights,
    weights_agreement,
)
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.bundle.verdict import FAILED, PASSED, UNDECIDED, Thresholds
from draftwell.serving.runtime.pair import LoadedPair, over_slots
from tests.support.models.tiny import llama, near, pair_of

PROMPTS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(["abcab cabinet", "hello hello", "zebra", "one two three"])
]
LIMIT = Thresholds(min_weights_agreement=0.97)


def pair(module: object) -> LoadedPair:
    made = pair_of(over_slots(module), None)
    made.chat = False
    return made


def test_equal_weights_agree_on_every_token_and_others_do_not() -> None:
    full = llama(2)
    same, other = (
        weights_agreement(pair(module), pair(full), PROMPTS, max_tokens=20)
        for module in (full, near(full, 0.3))
    )
    assert all(matches == tokens > 0 for matches, tokens in same)
    assert sum(matches for matches, _ in other) < sum(tokens for _, tokens in other)


@pytest.mark.parametrize(
    ("matches", "result"),
    [((100, 100, 99, 100), PASSED), ((80, 90, 85, 92), FAILED), ((100, 100, 100, 85), UNDECIDED)],
)
def test_the_interval_over_prompts_decides(matches: tuple[int, ...], result: str) -> None:
    [check] = judge_weights([(n, 100) for n in matches], "int4", LIMIT).checks
    assert (check.name, check.result) == ("int4 weights", result)


def test_without_a_limit_nothing_is_judged() -> None:
    assert judge_weights([(1, 10)] * 8, "int8", Thresholds()).checks == ()


@pytest.mark.parametrize(
    ("matches", "result"),
    [((100, 100, 99, 100), PASSED), ((80, 90, 85, 92), FAILED), ((100, 100, 100, 85), PASSED)],
)
def test_a_library_fails_where_it_surely_chooses_other_tokens(
    matches: tuple[int, ...], result: str
) -> None:
    [check] = judge_layers([(n, 100) for n in matches], LIMIT).checks
    assert (check.name, check.result) == ("compiled layers", result)
    assert "not enough evidence" not in check.detail
    assert judge_layers([(1, 100)] * 4, Thresholds()).checks == ()
