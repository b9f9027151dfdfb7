"""Cells that are replayed on a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.papers import runner
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import Cell, Scale
from draftwell.components.papers.plan import Run
from draftwell.components.papers.prompts import choose
from draftwell.components.papers.replays import constant_costs
from draftwell.components.papers.tables import papers_named
from draftwell.components.papers.verdicts import Verdict
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.runtime.strategies import StrategyResources
from tests.support.models.tiny import llama_pair
from tests.support.papers import (
    compared,
    measured_cell,
    paper_of,
    tiny_cell,
    write_sets,
)

TINY = Scale(
    "tiny",
    prompts=3,
    max_tokens=12,
    repeats=1,
    replayed=3,
)
CELL = tiny_cell(
    TINY,
    "tiny-counts",
    pair="tiny",
    data="code",
    replay=3,
    contenders={
        "SD": ("vanilla_sd:num_speculative_tokens=1", "vanilla_sd:num_speculative_tokens=4"),
        "PEARL": ("pearl",),
        "SPIDE": ("spide:tau=0.5",),
    },
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ("the man in the inn", "ten men", "an onion")
    return write_sets(tmp_path_factory.mktemp("sets"), {"humaneval.jsonl": texts})


def open_pair(cells: Sequence[Cell]) -> Any:
    return llama_pair(), StrategyResources({"acceptance_table": AcceptanceTable.empty()})


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory, sets: Path) -> CellFile:
    run = Run(tmp_path_factory.mktemp("cells"), data=sets)
    return measured_cell(CELL, run, open_pair)


def test_counts_are_those_of_a_real_run(counts: CellFile, sets: Path) -> None:
    """Target calls and accepted tokens of every contender and prompt, at the same ratio of
    costs."""
    pair = llama_pair()
    resources = StrategyResources(
        {"acceptance_table": AcceptanceTable.empty(), "hardware_profile": constant_costs(3, pair)},
        pair.special_tokens,
    )
    real = run_bench(
        pair,
        CELL.choices(),
        choose("code", 3, sets).prompts,
        resources,
        BenchSettings(max_tokens=12),
        cost_ratios=False,
    )
    assert counts.report.strategies.keys() == real.strategies.keys()
    for label, entry in real.strategies.items():
        for mine, run in zip(
            counts.report.strategies[label].per_prompt, entry.per_prompt, strict=True
        ):
            assert (mine.tokens, mine.target_calls, mine.accepted, mine.judged) == (
                run.tokens,
                run.target_calls,
                run.accepted,
                run.judged,
            ), (label, run.prompt_id)


def test_seconds_are_passes_at_the_papers_ratio(counts: CellFile) -> None:
    """A target pass is 3 draft passes and a quarter: plain decoding takes as much a token, SD a
    pass more for each drafted token."""
    plain, sd = (
        counts.report.strategies[label]
        for label in ("autoregressive", "vanilla_sd(num_speculative_tokens=1)")
    )
    assert plain.decode_tokens_per_second == pytest.approx(1 / 3.25)
    for row in sd.per_prompt:
        seconds = row.seconds - row.ttft_ms / 1e3
        assert row.target_calls * 3.25 <= seconds <= row.target_calls * 4.25 + 1


def test_only_pairs_that_ship_a_table_are_counted_without_it() -> None:
    (paper,) = papers_named("spide")
    for cell in paper.cells.values():
        ships = (Workspace(cell["pair"], "bfloat16").shipped / "acceptance_table").is_dir()
        if "replay" in cell:
            assert ("SPIDE, its table starts empty" in cell["contenders"]) == ships, cell["pair"]


def test_predicted_speeds_get_no_verdict(counts: CellFile) -> None:
    rows = (
        {"what": "a", "paper": "tiny.a", "metric": "speed", "over": "SD", "unlike": "other"},
        {"what": "b", "paper": "tiny.b", "metric": "calls", "over": "SD"},
    )
    paper = paper_of([one | {"role": "SPIDE"} for one in rows], "tiny-counts")
    speed, calls = compared(paper, counts)
    assert (speed.kind, speed.verdict) == ("replayed", Verdict.NOT_COMPARABLE)
    assert calls.verdict not in (Verdict.NOT_COMPARABLE, Verdict.OPEN)
    assert not calls.provisional
    (spide,) = papers_named("spide")
    for one in [one for _, rows in spide.placed for one in rows if "counts" in one.cell]:
        if one.row.metric in ("speed", "request"):
            assert one.row.unlike == "costs", one.row


def test_replays_come_first() -> None:
    """They take minutes; a pair for them is opened apart, since it is not padded."""
    measured = tiny_cell(
        TINY,
        "tiny-code",
        pair="tiny",
        pad_target=2e6,
        data="code",
        contenders={"SD": ("vanilla_sd",)},
    )
    assert [cell.name for cell in runner.by_pair([measured, CELL])] == ["tiny-counts", "tiny-code"]
    assert runner.needs(measured) != runner.needs(CELL)


def test_the_setting_that_came_later_leaves_older_files_as_they_are() -> None:
    cell = tiny_cell(
        TINY, "tiny-code", pair="tiny", data="code", contenders={"SD": ("vanilla_sd",)}
    )
    assert "replay" not in cell.settings()
    assert CELL.settings()["replay"] == 3


def test_a_collection_that_was_cut_short_goes_on(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was collected stays in a folder of the run."""

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("cut")

    run = Run(tmp_path, data=sets)
    monkeypatch.setattr("draftwell.components.papers.replays.replay_strategy", broken)
    assert runner.run_cells([CELL], run, open_pair) == {"tiny-counts": "RuntimeError: cut"}
    monkeypatch.undo()
    shards = list((tmp_path / "traces").rglob("*.parquet"))
    before = [shard.stat().st_mtime_ns for shard in shards]
    assert shards
    assert runner.run_cells([CELL], run, open_pair) == {}
    assert [shard.stat().st_mtime_ns for shard in shards] == before
