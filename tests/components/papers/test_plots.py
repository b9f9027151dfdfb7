"""Pictures of the pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftwell.components.papers.cells import FULL
from draftwell.components.papers.committed import committed_cells
from draftwell.components.papers.estimates import Estimate
from draftwell.components.papers.plots import draw_losses, draw_rows, ends
from draftwell.components.papers.results import Result, results
from draftwell.components.papers.tables import papers_named


@pytest.fixture(scope="module")
def rows() -> list[Result]:
    (paper,) = papers_named("csd")
    return results(paper, committed_cells([paper.measured_in(FULL)["csd-summaries"]]))[0][1]


def test_claims_and_losses_are_drawn_where_something_was_measured(
    rows: list[Result], tmp_path: Path
) -> None:
    for drawer in (draw_rows, draw_losses):
        path = tmp_path / f"{drawer.__name__}.png"
        assert drawer("CSD", rows, path) == path
        assert path.read_bytes().startswith(b"\x89PNG")
        nothing = [replace(one, ours=None) for one in rows]
        assert drawer("CSD", nothing, tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()
    assert ends(Estimate(1.4, 1.2, 1.5)) == [[pytest.approx(0.2)], [pytest.approx(0.1)]]
