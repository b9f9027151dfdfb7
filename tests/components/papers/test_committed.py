"""The cells that the project keeps: every page has them, and docs/papers.md is made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftwell.components.papers import committed
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import FULL
from draftwell.components.papers.page import Shown, remarks_on
from draftwell.components.papers.prompts import choose
from draftwell.components.papers.public import STAND_IN
from draftwell.components.papers.results import results
from draftwell.components.papers.tables import papers_named
from draftwell.components.papers.verdicts import Verdict
from draftwell.flows.steps.papers import Page
from tests.support.papers import changed, with_entry
from tests.support.paths import REPO

PAPERS = papers_named()
CELLS = {name: cell for paper in PAPERS for name, cell in paper.measured_in(FULL).items()}
KEPT = committed.committed_cells([*CELLS.values()])


@pytest.fixture
def spide() -> CellFile:
    return KEPT["spide-code-smollm2-135m-near-copy-29"]


def test_every_kept_file_is_a_cell_of_now() -> None:
    """A cell whose settings change loses its values on the page: measure it again, or leave its
    settings."""
    assert sorted(KEPT) == sorted(path.stem for path in committed.FOLDER.glob("*.json"))
    assert sorted(KEPT) == sorted(CELLS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "padded"), [("papers", None), ("papers-gpu", 7e9)])
def test_the_pages_are_what_the_command_makes_of_them(
    tmp_path: Path, name: str, padded: float | None
) -> None:
    """Slow: all cells are rendered. Nobody edits the pages by hand, no run that
    lacks a cell turns its values into "open", and pages keep no picture that nobody shows."""
    scale = replace(FULL, pad_target=padded) if padded else FULL
    page = Page(tmp_path / f"{name}.md", PAPERS, scale)
    files = page.write(committed.committed_cells(page.cells), {})
    made = [path.relative_to(tmp_path) for path in files]
    for path in made:
        if path.suffix == ".md":
            again = f"run `draftwell reproduce papers --set kept=true --set page=docs/{name}.md`"
            assert (tmp_path / path).read_text() == (REPO / "docs" / path).read_text(), again
    if not padded:
        kept = {path.name for path in (REPO / "docs" / "images").glob("papers-*")}
        assert kept == {path.name for path in made if path.suffix == ".png"}


def test_measured_rows_have_values() -> None:
    for paper in PAPERS:
        for table, rows in results(paper, KEPT):
            opened = [one.placed.row.what for one in rows if one.verdict == Verdict.OPEN]
            assert opened == [], table.title


def test_pages_of_shipped_prompts_say_so(spide: CellFile) -> None:
    """By what the page shows, not by the options of the run that wrote it."""
    name = spide.cell.name
    other = spide.model_copy(update={"source": choose("code", 2, None).source})
    assert remarks_on(Shown(PAPERS, FULL, {name: spide})) == []
    assert remarks_on(Shown(PAPERS, FULL, {name: other})) == [STAND_IN]


def test_a_profile_that_is_not_monotone_is_named() -> None:
    """More tokens in less time cannot both be true of one machine."""
    assert KEPT["duodecoding-maths"].uneven == ("0.108 s over 2 tokens at once, 0.099 s over 3")
    assert KEPT["spide-code-smollm2-135m-near-copy-29"].uneven == ""


def test_another_cell_of_that_name_is_not_the_kept_one(spide: CellFile) -> None:
    cell = CELLS[spide.cell.name]
    assert committed.committed_cells([cell]) == {cell.name: spide}
    assert committed.committed_cells([changed(cell, max_tokens=65)]) == {}


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
