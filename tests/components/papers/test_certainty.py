"""How certain the models of a pair are: PyramidSD's Figure 3."""

from __future__ import annotations

import math

import pytest
import torch

from draftwell.components.papers.certainty import certainty, certainty_of
from draftwell.components.prompts.prompt import Prompt
from tests.support.models.tiny import llama_pair, table_pair

PROMPTS = [Prompt("a", "code", ["the man in the inn"]), Prompt("b", "code", ["ten men"])]


def test_every_model_is_read_at_the_same_places_of_the_targets_texts() -> None:
    pair = llama_pair()
    found = certainty(pair, PROMPTS, max_tokens=6, temperature=0.7, seed=3)
    assert set(found) == {"draft", "target"}
    assert (
        [one.positions for one in found["draft"]]
        == [one.positions for one in found["target"]]
        == [6, 6]
    )
    for texts in found.values():
        assert all(
            0 < one.entropy < one.positions * math.log(pair.models["target"].vocab_size)
            for one in texts
        )
        assert all(
            1 / pair.models["target"].vocab_size < one.confidence / one.positions <= 1
            for one in texts
        )
    assert found == certainty(pair, PROMPTS, max_tokens=6, temperature=0.7, seed=3)
    assert found != certainty(pair, PROMPTS, max_tokens=6, temperature=0.7, seed=4)


def test_heads_over_a_part_of_the_vocabulary_are_not_compared() -> None:
    pair = llama_pair()
    pair.models["draft"].head_tokens = torch.arange(5)
    assert certainty(pair, PROMPTS, max_tokens=6, temperature=0.7) == {}


def test_a_places_distribution_is_that_behind_the_tokens_before_it() -> None:
    """The first is the prompt's last row; the output's own last token is behind all of them."""
    pair, prompt, output = table_pair(), [5, 4, 3], [7, 6, 2, 8]
    rows = pair.models["target"].table[[3, 7, 6, 2]].double()
    probabilities = rows.softmax(-1)
    found = certainty_of(pair, "target", prompt, output)
    assert found.positions == 4
    assert found.entropy == pytest.approx(
        float(-(probabilities * probabilities.log()).sum()), rel=1e-4
    )
    assert found.confidence == pytest.approx(float(probabilities.max(-1).values.sum()), rel=1e-4)
