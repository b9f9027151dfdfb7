"""Gains on emulated devices, as the papers' summary shows them."""

from __future__ import annotations

import pytest

from draftwell.components.emulation.cells import read_runs
from draftwell.components.emulation.page import Compared, gain_cells, summary_cells
from draftwell.components.emulation.result import EmulatedRun

RUNS = [*read_runs().values()]


def test_gains_are_found_by_strategy_the_cheapest_draft_first() -> None:
    """Of devices of their own alone."""
    found = summary_cells(RUNS)
    costs = [part.partition(",")[0] for part in found["spide", "vanilla_sd"][0].split(" at c ")[1:]]
    assert costs == sorted(costs, key=float)
    assert len(costs) > 1
    assert summary_cells([run for run in RUNS if run.placement == "shared"]) == {}


def owned() -> EmulatedRun:
    return next(run for run in RUNS if run.placement == "own" and run.curve.cost is not None)


@pytest.mark.parametrize(("prompts", "trust"), [(29, "low"), (30, "medium"), (100, "high")])
def test_few_prompts_deserve_little_trust(prompts: int, trust: str) -> None:
    run = owned().model_copy(update={"prompt_ids": ("a",) * prompts})
    cells = gain_cells([(run, Compared("spide", "sd", 1.2, 1.1, 1.3, 1.25))])
    assert cells[-1] == trust
    assert cells[0].startswith("emulated: 1.20 [1.10, 1.30] at c ")


def test_a_slowdown_is_counted_beside_the_gains() -> None:
    both = (1.2, 1.1, 1.3), (0.97, 0.95, 0.99)
    cells = gain_cells([(owned(), Compared("spide", "sd", *ends, 1.25)) for ends in both])
    assert "above 1 in 1, below 1 in 1 of 2" in cells[-2]
