"""What a bundle for vLLM keeps of its tuning, and what its server is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.bench.engines.measure import groups_of
from draftwell.components.engines.port import Acceptance
from draftwell.flows.steps.engine.deploy import counts_by_prompt
from draftwell.flows.steps.engine.serve import server_environment
from tests.support.peers.environments import install


def figure(at_once: int, groups: int, each: list[tuple[int, int]]) -> Figure:
    parts = [Acceptance(rounds=rounds, accepted_at=(kept,)) for kept, rounds in each]
    return Figure(
        label="ngram",
        at_once=at_once,
        groups=groups,
        prompts=3,
        ratio=1.0,
        low=1.0,
        high=1.0,
        tokens_per_second=1.0,
        plain_tokens_per_second=1.0,
        acceptance=Acceptance.total(parts),
    )


def test_answers_of_a_prompt_count_together_at_all_loads() -> None:
    """Above one at once by the order in which groups were really sent: each round has its own."""
    one = figure(1, 3, [(1, 2), (0, 0), (3, 4)])
    assert counts_by_prompt([one]) == [(1, 2), (0, 0), (3, 4)]
    order = [place for group in groups_of([[0], [1], [2]], 4, 5) for (place,) in group]
    assert order != [place % 3 for place in range(20)]
    many = figure(4, 5, [(place, 10) for place in order])
    counts = [order.count(place) for place in range(3)]
    assert counts_by_prompt([one, many]) == [
        (1, 2 + 10 * counts[0]),
        (counts[1], 10 * counts[1]),
        (3 + 2 * counts[2], 4 + 10 * counts[2]),
    ]


def test_of_an_earlier_choice_no_counts_of_prompts_are_known() -> None:
    old = figure(1, 3, [(1, 2), (0, 0), (3, 4)])
    old = old.model_copy(update={"acceptance": old.acceptance.model_copy(update={"each": ()})})
    assert counts_by_prompt([old]) == counts_by_prompt([]) == []


def test_a_server_keeps_the_preload_that_a_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "peers", monkeypatch, ("vllm",))
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("PYTHONPATH", "ours")
    found = server_environment("tiny")
    assert found["LD_PRELOAD"] == ""
    assert "PYTHONPATH" not in found
    monkeypatch.delenv("LD_PRELOAD")
    assert "LD_PRELOAD" not in server_environment("tiny")
