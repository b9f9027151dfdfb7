"""The emulated cells, the runs of them that the project keeps, and their page."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.components.emulation.cells import (
    CALIBRATION,
    KEPT,
    EmulatedCell,
    counted,
    emulated_cells,
    read_runs,
)
from draftwell.components.emulation.curve import find_curve
from draftwell.components.emulation.page import beside_prediction, emulated_page, summary_cells
from draftwell.components.emulation.result import EmulatedRun
from draftwell.components.papers.prompts import Chosen
from draftwell.components.prompts.prompt import Prompt
from draftwell.registry.pairs import find_pair

CELLS = {cell.name: cell for cell in emulated_cells()}
RUNS = read_runs()


def test_every_kept_run_is_of_a_cell() -> None:
    assert sorted(RUNS) == sorted(path.stem for path in KEPT.glob("*.json"))
    assert RUNS


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_cells_can_be_run(cell: EmulatedCell) -> None:
    assert find_curve(cell.curve).cost
    assert find_pair(cell.pair_name).name
    assert cell.prompts >= 100


@pytest.mark.parametrize("name", RUNS)
def test_kept_runs_have_the_settings_of_their_cell_and_agree_with_formulas(name: str) -> None:
    run, cell = RUNS[name], CELLS[name]
    assert run.curve == find_curve(cell.curve)
    assert run.placement == cell.placement
    assert run.max_tokens == cell.max_tokens
    assert [row.strategy for row in run.rows.values()] == cell.strategies
    assert len(run.prompt_ids) == cell.prompts
    assert run.void is None
    assert run.identical == len(run.prompt_ids)
    assert all(one.close for one in beside_prediction(run))


def test_quick_cells_are_small() -> None:
    assert {(cell.prompts, cell.max_tokens) for cell in emulated_cells(quick=True)} == {(2, 12)}


@pytest.mark.parametrize(("rows", "count"), [(108, 100), (122, 114), (10, 8), (2, 1)])
def test_the_last_prompts_calibrate(rows: int, count: int) -> None:
    prompts = [Prompt(f"p{i}", None, ["text"]) for i in range(rows)]
    assert CALIBRATION == 8
    assert counted(Chosen(prompts, "a set")) == prompts[:count]


def test_the_page_has_every_comparison_and_says_why_a_run_is_void() -> None:
    name, run = next(iter(RUNS.items()))
    page = emulated_page({name: run})
    for one in beside_prediction(run):
        if one.over:
            assert f"| {one.what} | {one.emulated:.3f} [{one.low:.3f}, {one.high:.3f}]" in page
    assert f"- `{run.curve.name}`: {run.curve.source}." in page
    assert "(`spide-c0.2`, `spide-c0.3`, " in page
    void = run.model_copy(update={"void": "it was late", "ratios": ()})
    assert "| void: it was late |" in emulated_page({name: void})
    assert summary_cells([void]) == {}


def test_the_summary_takes_devices_of_their_own() -> None:
    run = RUNS["spide-c0.1"]
    said = " ".join(summary_cells([run])["spide", "vanilla_sd"])
    assert "at c 0.1" in said
    assert "100" in said
    assert summary_cells([run.model_copy(update={"placement": "shared"})]) == {}


def test_a_void_run_and_one_of_other_prompts_are_run_again(tmp_path: Path) -> None:
    """The shipped prompts stand in where there is no data set."""
    cell = CELLS["spide-c0.1"]
    run: EmulatedRun = RUNS[cell.name]
    assert not cell.is_of(run, None)
    ids = tuple(prompt.id for prompt in counted(cell.prompts_of(None)))
    same = run.model_copy(update={"prompt_ids": ids})
    assert cell.is_of(same, None)
    assert not cell.is_of(same.model_copy(update={"void": "late"}), None)
    assert not cell.is_of(same.model_copy(update={"max_tokens": 31}), None)
