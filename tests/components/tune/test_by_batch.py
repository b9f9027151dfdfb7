"""Draft lengths by the number of requests at once: on engines whose speed is made up, and on a pair
of tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from draftwell.components.bench.engines.measure import decode_together
from draftwell.components.engines.port import Answer, Decoded
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.tune import by_batch as module
from draftwell.components.tune.by_batch import measure_levels
from draftwell.components.tune.evidence import TuningEvidence
from draftwell.components.tune.levels import table_of
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import (
    PLAIN,
    Strategy,
    StrategyChoice,
    StrategyResources,
    build_strategy,
)
from tests.support.models.tiny import table_pair

SIX = StrategyChoice("vanilla_sd", {"num_speculative_tokens": 6})
SAMPLING = Sampling(max_tokens=12)
PROMPTS = [Prompt(f"p{i}", None, [text], text) for i, text in enumerate("abcdefghijkl")]


def lengths_on(
    monkeypatch: pytest.MonkeyPatch, speed: Callable[[int, int], float], slots: int = 8
) -> dict[int, int]:
    """The table of an engine with so many tokens a second by requests at once and draft length."""

    def decode(engine: Any, strategy: Strategy, group: Sequence[Any], sampling: Any) -> Decoded:
        length = min(strategy.draft_limit(len(group)), strategy.longest_draft or 0)
        seconds = 10 / speed(len(group), length)
        answers = [Answer(tokens=[1] * 10, seconds=seconds, first_token_seconds=0.0) for _ in group]
        return Decoded(seconds=seconds * len(group), answers=answers)

    monkeypatch.setattr(module, "decode_together", decode)
    pair = table_pair(slots=slots)
    levels, figures = measure_levels(pair, StrategyResources(), SIX, PROMPTS, SAMPLING)
    assert all(figure.prompts >= 8 for figure in figures)
    return table_of(levels)


@pytest.mark.parametrize(
    ("speed", "table"),
    [
        (lambda requests, length: 1.0 + length, {1: 6, 2: 6, 4: 6, 8: 6}),
        (
            lambda requests, length: 1 + length * (requests < 4 or length < 4),
            {1: 6, 2: 6, 4: 3, 8: 3},
        ),
        (lambda requests, length: 1.0 + length * (requests < 4), {1: 6, 2: 6, 4: 0}),
        (lambda requests, length: 1.0, {1: 6, 2: 0}),
    ],
    ids=["drafts pay", "shorter ones", "for few", "never"],
)
def test_each_number_of_requests_gets_the_fastest_length_until_none_pays(
    monkeypatch: pytest.MonkeyPatch,
    speed: Callable[[int, int], float],
    table: dict[int, int],
) -> None:
    assert lengths_on(monkeypatch, speed) == table


def test_no_more_requests_are_measured_than_there_are_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lengths_on(monkeypatch, lambda requests, length: 1.0 + length, slots=5) == {
        1: 6,
        2: 6,
        4: 6,
    }


@pytest.mark.parametrize(("choice", "slots"), [(PLAIN, 4), (SIX, 1)])
def test_there_is_nothing_to_measure_of_plain_decoding_or_for_a_single_slot(
    choice: StrategyChoice, slots: int
) -> None:
    pair = table_pair(slots=slots)
    assert measure_levels(pair, StrategyResources(), choice, PROMPTS, SAMPLING) == ([], [])


def test_a_group_is_decoded_within_the_limit_and_to_the_targets_text() -> None:
    pair = table_pair()
    group = [ids_of(pair, prompt) for prompt in PROMPTS[:3]]
    limited = build_strategy(SIX.name, SIX.parameters)
    limited.draft_length_by_batch = {1: 2}
    engine = pair.engine()
    sizes: list[int] = []
    forward = engine.models["target"].forward

    def watched(rows: Sequence[Any]) -> Any:
        sizes.extend(len(row.tokens) for row in rows if not row.prefill)
        return forward(rows)

    engine.models["target"].forward = watched  # type: ignore[method-assign]
    found = decode_together(engine, limited, group, SAMPLING)
    plain = decode_together(pair.engine(), build_strategy(PLAIN.name), group, SAMPLING)
    assert [one.tokens for one in found.answers] == [one.tokens for one in plain.answers]
    assert all(0 < one.seconds <= found.seconds for one in found.answers)
    assert max(sizes) == 3


def test_a_pair_is_measured_for_real() -> None:
    levels, figures = measure_levels(table_pair(), StrategyResources(), SIX, PROMPTS, SAMPLING)
    assert levels[0].k == 6
    assert {figure.label for figure in figures} == {"3", "6"}
    assert {figure.at_once for figure in figures} <= {2, 4}
    evidence = TuningEvidence(choice=SIX, levels=levels, loads=figures)
    assert TuningEvidence.read(json.loads(json.dumps(evidence.to_json()))) == evidence
