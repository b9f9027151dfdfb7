"""The watchdog's own requests: prompts that never change, and a budget that nothing forgets."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from draftwell.components.watch.probes import (
    HOUR,
    LENGTHS,
    TOKENS_PER_PROBE,
    ProbeBudget,
    least_recent,
    probe_prompts,
)

NOW = 1_800_000_000.0


def words(text: str) -> list[int]:
    """A tokenizer of whole words, the longest tokens that there are."""
    return [sum(map(ord, word)) for word in text.split(" ")]


@pytest.mark.parametrize("encode", [words, lambda text: [ord(c) for c in text]])
def test_prompts_have_their_lengths_in_any_tokens_and_end_with_a_question(
    encode: Callable[[str], Sequence[int]],
) -> None:
    prompts = probe_prompts(encode)
    assert sorted((p.kind, len(p.ids)) for p in prompts) == [
        (kind, length) for kind in ("code", "copy", "prose") for length in LENGTHS
    ]
    assert len({p.ids for p in prompts}) == len({p.name for p in prompts}) == 9
    by_kind = {p.kind: p.ids[-8:] for p in prompts}
    assert all(p.ids[-8:] == by_kind[p.kind] for p in prompts)
    assert [p.ids for p in probe_prompts(encode)] == [p.ids for p in prompts]


def test_a_budget_is_spread_over_the_hour_and_survives_a_restart(tmp_path: Path) -> None:
    """Twelve an hour in pairs: one pair at a time, ten minutes apart, whatever is restarted."""
    sent = []
    for minute in range(120):
        budget = ProbeBudget(tmp_path / "spent.json", 12)
        for _ in range(budget.due(NOW + 60 * minute, 2)):
            for _ in range(2):
                budget.spend(NOW + 60 * minute, 500)
                sent.append(minute)
    assert sent[:6] == [0, 0, 10, 10, 20, 20]
    assert max(sum(1 for at in sent if m <= at < m + 60) for m in range(61)) == 12


def test_a_look_an_hour_spends_what_the_hour_earned(tmp_path: Path) -> None:
    budget = ProbeBudget(tmp_path / "spent.json", 12)
    assert budget.due(NOW, 1) == 1
    budget.spend(NOW, 500)
    assert budget.due(NOW + HOUR, 1) == 12
    assert budget.due(NOW + HOUR, 2) == 6


def test_tokens_are_counted_too(tmp_path: Path) -> None:
    """Long prompts use a budget up before its requests do."""
    budget = ProbeBudget(tmp_path / "spent.json", 4)
    budget.spend(NOW, 3 * TOKENS_PER_PROBE + 1)
    assert budget.due(NOW + HOUR - 1, 1) == 0
    assert budget.due(NOW + HOUR, 1) == 4


@pytest.mark.parametrize("damage", ["", "{", "[[1]]", '{"a": 1}'])
def test_a_damaged_budget_sends_nothing(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "spent.json"
    file.write_text(damage)
    assert ProbeBudget(file, 5).due(NOW, 1) == 0
    file.write_text(json.dumps([]))
    assert ProbeBudget(file, 5).due(NOW, 1) == 5


def test_the_prompt_that_was_asked_longest_ago_is_next() -> None:
    prompts = probe_prompts(words, (200,))
    names = [p.name for p in least_recent(prompts, {"prose 200": 5.0, "copy 200": 3.0})]
    assert names == ["code 200", "copy 200", "prose 200"]
