"""The cells that the project keeps: every page has them, and docs/papers.md is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from draftwell.components.papers import committed
from draftwell.components.papers.asides import (
    contention_words,
    curves,
    identity_words,
    tried,
)
from draftwell.components.papers.catalogue import PAPERS
from draftwell.components.papers.cell_file import CellFile, counted_texts
from draftwell.components.papers.cells import FULL, Scale
from draftwell.components.papers.comparison import results
from draftwell.components.papers.page import CONFIDENCE, POINTS, further, render
from draftwell.components.papers.prompts import choose
from draftwell.components.papers.public import STAND_IN
from draftwell.components.papers.tables import Paper, without_replayed
from draftwell.components.papers.verdicts import Verdict
from tests.support.papers import changed, with_entry
from tests.support.paths import REPO

CELLS = {table.cell.name: table.cell for paper in PAPERS.values() for table in paper.tables(FULL)}
KEPT = committed.committed_cells(list(CELLS.values()))


@pytest.fixture
def spide() -> CellFile:
    return KEPT["spide-code-smollm2-135m-near-copy-29"]


def test_every_kept_file_is_a_cell_of_now() -> None:
    """A cell whose settings change loses its values on the page: measure it again, or leave its
    settings."""
    assert sorted(KEPT) == sorted(path.stem for path in committed.FOLDER.glob("*.json"))
    assert {"csd-code", "spide-code-smollm2-135m-near-copy-29"} <= KEPT.keys()


def shown(papers: Sequence[Paper], scale: Scale, cells: Mapping[str, CellFile]) -> list[str]:
    """Names of tables that have a picture."""
    tables = [
        table for paper in papers for table in paper.tables(scale) if table.cell.name in cells
    ]
    return [table.name for table in tables] + [
        table.name + end
        for table in tables
        for end, data in further(table, cells[table.cell.name]).items()
        if data
    ]


@pytest.mark.slow
def test_the_page_is_what_the_command_makes_of_them() -> None:
    """Nobody edits it by hand, and no run that lacks a cell turns its values into "open"."""
    papers = list(PAPERS.values())
    without_speeds = {
        table.name
        for paper in papers
        for table in paper.tables(FULL)
        if not any("speed" in row.what and row.paper is not None for row in table.rows)
    }
    names = [name for name in shown(papers, FULL, KEPT) if name not in without_speeds]
    names += [CONFIDENCE] if counted_texts(list(CELLS.values()), KEPT) else []
    pictures = {name: Path(f"images/papers-{name}.png") for name in (*names, POINTS)}
    assert all((REPO / "docs" / picture).is_file() for picture in pictures.values())
    made = render(papers, FULL, KEPT, pictures=pictures)
    assert made == (REPO / "docs" / "papers.md").read_text(encoding="utf-8"), (
        "run `draftwell reproduce papers --set kept=true --set page=docs/papers.md`"
    )


def test_the_page_of_another_padding_is_what_the_command_makes_of_its_cells() -> None:
    """It has the tables that were measured so, and no others."""
    scale, papers = replace(FULL, pad_target=7e9), list(map(without_replayed, PAPERS.values()))
    cells = [table.cell for paper in papers for table in paper.tables(scale)]
    found = committed.committed_cells(cells)
    assert sorted(found) == sorted(
        path.stem for path in (committed.FOLDER / "padded-7b").glob("*.json")
    )
    names = (*shown(papers, scale, found), POINTS)
    pictures = {name: Path(f"images/papers-padded-7b-{name}.png") for name in names}
    made = render(papers, scale, found, pictures=pictures)
    assert made == (REPO / "docs" / "papers-gpu.md").read_text(encoding="utf-8"), (
        "run `draftwell reproduce papers --set kept=true --set pad_target=7e9 --set "
        "page=docs/papers-gpu.md`"
    )
    assert "Not measured yet" not in made
    assert "on one NVIDIA H200, " in made
    assert PAPERS["sprinter"].tables(FULL)[0].title not in made


def test_tables_of_shipped_prompts_are_announced(spide: CellFile) -> None:
    """By what the page shows, not by the options of the run that wrote it."""
    papers, name = [PAPERS["spide"]], spide.cell["name"]
    assert STAND_IN not in render(papers, FULL, {name: spide})
    assert STAND_IN in render(
        papers, FULL, {name: spide.model_copy(update={"source": choose("code", 2, None).source})}
    )


def test_what_decoding_alone_leaves_out_is_said_where_it_is_compared(spide: CellFile) -> None:
    """PEARL and DuoDecoding draft beside the target's reading of the prompt, which takes no longer
    for it; kept cells show it."""
    first = {
        role: mean(row.ttft_ms for row in spide.measured().entry(role).per_prompt)
        for role in ("SD", "SPIDE", "PEARL")
    }
    assert max(first.values()) < 1.05 * min(first.values())
    for paper, early in (("spide", "PEARL"), ("duodecoding", "DuoDec")):
        for table in PAPERS[paper].tables(FULL):
            if early in table.cell.contenders and table.cell.replay is None:
                assert any(
                    note.startswith(f"{early} drafts while the target reads the prompt")
                    for note in table.notes
                ), table.name


def test_another_calibration_of_the_memory_is_not_compared() -> None:
    """The paper's "memory only" is calibrated on the task, ours and the row of CSD on mixed
    prompts."""
    rows = [
        row for table in PAPERS["csd"].tables(FULL) for row in table.rows if row.paper is not None
    ]
    assert {row.role for row in rows if not row.comparable} == {
        "memory only",
        "CSD from an empty memory",
    }
    assert all(not row.comparable for row in rows if row.role == "memory only")


def test_measured_rows_have_values() -> None:
    for paper in PAPERS.values():
        for table in paper.tables(FULL):
            if table.cell.name in KEPT:
                found = results(table, KEPT[table.cell.name])
                assert [row.what for row in found if row.verdict == Verdict.OPEN] == [], table.name


def test_a_runs_own_cell_takes_the_place_of_the_kept_one_unless_it_is_the_same(
    spide: CellFile,
) -> None:
    cell = CELLS[spide.cell["name"]]
    longer = spide.model_copy(update={"seconds": spide.seconds + 1, "remarks": ()})
    again = spide.model_copy(update={"remarks": ()})
    assert committed.with_committed({cell.name: longer}, [cell])[cell.name] == longer
    assert committed.with_committed({cell.name: again}, [cell])[cell.name].remarks != (), (
        "it has the remarks"
    )
    assert committed.with_committed({}, [cell])[cell.name] == spide
    other = changed(cell, max_tokens=65)
    assert committed.with_committed({}, [other]) == {}, "another cell of that name"


def test_what_is_kept_of_a_cell_is_all_that_the_page_needs(spide: CellFile, tmp_path: Path) -> None:
    """Reading what was written changes nothing: no row, no word under it."""
    (tmp_path / "a.json").write_text(committed.compact(spide, ["Tests ran beside it."]))
    again = committed.read_kept(tmp_path / "a.json")
    assert again is not None
    assert again.remarks == (*spide.remarks, "Tests ran beside it.")
    assert again.model_copy(update={"remarks": spide.remarks}) == spide


def test_numbers_of_sequences_survive_their_file(spide: CellFile, tmp_path: Path) -> None:
    """JSON's keys are text; a row without any has no such part."""
    label, entry = next(iter(spide.report.strategies.items()))
    first, *rest = entry.per_prompt
    rows = (first.model_copy(update={"sequences": {1: (3, 2), 4: (0, 5)}}), *rest)
    file = with_entry(spide, label, per_prompt=rows)
    (tmp_path / "b.json").write_text(committed.compact(file))
    again = committed.read_kept(tmp_path / "b.json")
    assert again is not None
    assert [row.sequences for row in again.report.strategies[label].per_prompt[:2]] == [
        {1: (3, 2), 4: (0, 5)},
        None,
    ]


def test_what_stands_under_a_table(spide: CellFile) -> None:
    """Whose texts differ, what overlapping costs, and every setting that was tried."""
    assert "write plain decoding's text on 9 to 10 of 12 prompts" in identity_words(spide)
    assert (
        "15 ms on its share of them while the target is idle, and 15 ms while both compute"
        in contention_words(spide)
    )
    assert contention_words(spide.model_copy(update={"costs": None})) == ""
    assert contention_words(KEPT["csd-code"]) == "", "nothing overlaps there"
    rows = [line for line in tried(spide).splitlines() if line.startswith("| SPIDE |")]
    assert [row.split("|")[5].strip() for row in rows] == ["0.68", "0.80", "0.93", "1.04"]
    assert "| Lossy SD | τ 0.6, γ 6 |" in tried(KEPT["csd-code"]), (
        "also where each role has one setting"
    )
    found = curves(spide)
    assert list(found) == ["SPIDE", "without parallel verification"]
    assert curves(KEPT["pyramidsd-choice"]) == {}, "fuzzy SD's draft lengths differ, too"
    assert [round(share, 2) for share in found["SPIDE"].speeds] == [1.02, 1.06, 1.05, 1.06]
    assert [round(share, 2) for share in found["SPIDE"].calls] == [0.68, 0.80, 0.93, 1.04]
