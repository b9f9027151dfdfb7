"""Gains on emulated devices, as the summary shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftwell.components.papers.emulated import EmulatedGain, gains_of
from draftwell.components.papers.estimates import Estimate
from draftwell.components.papers.page import emulated_cells
from draftwell.components.papers.tables import Claim

CLAIM = Claim(claim="it is faster", regime="theirs", why="", emulated=["spide", "vanilla_sd"])


SLOWER = Estimate(0.97, 0.95, 0.99)


def gain(cost: float = 0.2, prompts: int = 100, over: str = "vanilla_sd") -> EmulatedGain:
    return EmulatedGain("spide", over, cost, 0.9, Estimate(1.2, 1.1, 1.3), 1.25, prompts, 32)


def test_gains_are_found_by_strategy_the_cheapest_draft_first() -> None:
    found = [gain(0.3), gain(0.1), gain(0.2, over="pearl")]
    assert [one.cost for one in gains_of(found, "spide", "vanilla_sd")] == [0.1, 0.3]
    assert gains_of(found, "pearl", "vanilla_sd") == []


@pytest.mark.parametrize(("prompts", "trust"), [(29, "low"), (30, "medium"), (100, "high")])
def test_few_prompts_deserve_little_trust(prompts: int, trust: str) -> None:
    cells = emulated_cells(CLAIM, [gain(prompts=prompts)])
    assert cells[-1] == trust
    assert "emulated: 1.20 [1.10, 1.30] at c 0.2" in cells


def test_a_slowdown_is_counted_beside_the_gains() -> None:
    cells = emulated_cells(CLAIM, [gain(0.1), replace(gain(0.2), ours=SLOWER)])
    assert "above 1 in 1, below 1 in 1 of 2" in cells[-2]
