"""What a round takes, part by part: DuoDecoding's and CSD's Figures 4."""

from __future__ import annotations

import pytest

from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.papers.rounds import round_cost


def entry(**shares: float) -> BenchEntry:
    """Two texts of 10 seconds in all, 8 rounds, 16 of 32 draft tokens accepted."""
    rows = tuple(
        PromptRow(prompt_id=name, seconds=5.0, tokens=13, target_calls=4, accepted=8, judged=12)
        for name in "ab"
    )
    return BenchEntry(draft_efficiency=0.5, time_share=shares or None, per_prompt=rows)


def test_a_round_is_a_target_pass_and_no_prompts_reading() -> None:
    found = round_cost(entry(draft=0.1, target=0.5, overlap=0.16, prefill=0.2, rest=0.04))
    assert found is not None
    assert found.seconds == pytest.approx(
        {"draft": 0.125, "target": 0.625, "overlap": 0.2, "rest": 0.05}
    )
    assert found.total == pytest.approx(8.0 / 8)
    assert (found.drafted, found.written) == (4.0, 3.0), (
        "the first token of each text comes with its prompt"
    )


def test_a_prompts_pass_that_judges_a_draft_is_no_round() -> None:
    """DuoDecoding's first pass over each text reads the prompt: its seconds are the prompt's."""
    first = entry(target=0.6, prefill=0.4).model_copy(update={"strategy": "duo_decoding"})
    found = round_cost(first)
    assert found is not None
    assert found.seconds == pytest.approx({"target": 1.0}), "6 rounds in 6 seconds"
    assert (found.drafted, found.written) == (None, None), (
        "both have the prompt's own draft in them"
    )


def test_a_time_that_was_not_taken_apart_is_not_shown() -> None:
    assert round_cost(entry()) is None
