"""What `draftwell reproduce papers` does when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from draftwell.components.emulation.cells import EmulatedCell, emulated_cells, read_runs
from draftwell.components.papers.cells import FULL, QUICK, padding_name
from draftwell.components.papers.committed import committed_cells
from draftwell.components.papers.plan import Run
from draftwell.components.papers.runner import measured_cells, run_cells
from draftwell.components.papers.tables import papers_named
from draftwell.components.report.drawing import check_drawing
from draftwell.flows.cli.options import check_folder, check_output, say
from draftwell.flows.steps.papers import (
    Page,
    counts_of,
    emulate,
    log_page,
    made_of,
    open_cells,
    own_format,
)
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.device import device_class
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.papers.cell_file import CellFile
    from draftwell.components.papers.cells import Cell, Scale
    from draftwell.components.papers.tables import Paper
    from draftwell.flows.steps.papers import Page

EMULATED = "emulated"
"""What `only` calls the runs on emulated devices, which are of no single paper."""
Named = TypeVar("Named", "Cell", EmulatedCell)


def run_tables(
    *,
    quick: bool,
    only: str | None,
    cell: str | None,
    out: Path | None,
    page: Path | None,
    data: Path | None,
    pad_target: float | None,
    render: bool,
    kept: bool,
    publish: bool,
    number_format: str | None,
    device: str,
) -> None:
    """Measure what is wanted, and write the page; the options are those of the command."""
    chosen, everything, scale = tables_at(only, quick, pad_target)
    if out is not None:
        check_folder(out)
    if page is not None:
        check_output(page)
    check_data(data)
    check_drawing()
    number_format = number_format or own_format(device)
    folder = out or draftwell_home() / "papers"
    marks = "papers", padding_name(pad_target), "quick" if quick else "" if data else "shipped"
    shown = Page(page or folder / f"{'-'.join(filter(None, marks))}.md", everything, scale)
    run = run_of(folder / scale.name, data, number_format, device, scale)
    writer = PageWriter(shown, run, kept)
    try:
        if only == EMULATED and not (render or kept):
            wanted = cells_named(emulated_cells(quick=quick), cell)
            for _ in emulate(wanted, writer.emulated, data, number_format, say):
                writer.write({})
        elif not (render or kept):
            run_cells(
                cells_named(
                    [one for paper in chosen for one in paper.measured_in(scale).values()], cell
                ),
                run,
                lambda together: open_cells(together, number_format, device, say),
                say=say,
                after=writer.write,
            )
    finally:
        files = writer.write({})
    if publish and (logged := log_page(shown, files)):
        say(f"the pages are in MLflow: {logged}")
    say(writer.summary())
    if writer.failed:
        raise typer.Exit(1)


def tables_at(
    only: str | None, quick: bool, pad_target: float | None
) -> tuple[list[Paper], list[Paper], Scale]:
    """The papers to measure, all that the page shows, and the size of the run."""

    scale = QUICK if quick else FULL
    if pad_target not in (None, scale.pad_target):
        scale = replace(scale, pad_target=pad_target)
    return [] if only == EMULATED else papers_named(only), papers_named(), scale


def check_data(data: Path | None) -> None:
    """Refuse a folder of data sets that is not there."""
    if data is not None and not data.is_dir():
        raise DraftwellError(
            f"--data: there is no folder {data}: docs/papers.md says what to download into "
            "it, or leave --data out to "
            "take the shipped prompts",
            code="no_data",
        )


def run_of(folder: Path, data: Path | None, number_format: str, device: str, scale: Scale) -> Run:
    """Where the cells of a run are, and what makes their keys."""
    import torch

    return Run(
        folder,
        f"{number_format} on {device_class(device)}, {torch.get_num_threads()} threads",
        data,
        lambda cell: made_of(cell, number_format, device, say),
    )


class PageWriter:
    """Writes the page of a run whenever a cell was measured or has failed.

    Args:
        kept: the page shows what the project keeps, and nothing of this run.
    """

    def __init__(self, page: Page, run: Run, kept: bool):
        self.page, self.run, self.kept = page, run, kept
        self.failed: dict[str, str] = {}
        self.emulated = run.folder / EMULATED

    def cells(self) -> tuple[dict[str, CellFile], dict[str, CellFile]]:
        """Those of this run, and all that the page shows."""

        own = {} if self.kept else measured_cells(self.page.cells, self.run)
        return own, committed_cells(self.page.cells) | own

    def write(self, failures: Mapping[str, str]) -> list[Path]:
        """Write it; its files."""
        self.failed.update(failures)
        emulated = read_runs() | ({} if self.kept else read_runs(self.emulated))
        return self.page.write(self.cells()[1], self.failed, emulated)

    def summary(self) -> str:
        """How many cells there are, and where the page is."""

        return f"{counts_of(self.page.cells, *self.cells())}; the page is {self.page.path}"


def cells_named(cells: Sequence[Named], pattern: str | None) -> list[Named]:
    """The cells whose names match a pattern, all of them without one.

    Raises:
        DraftwellError: none does.
    """
    found = [cell for cell in cells if pattern is None or fnmatch(cell.name, pattern)]
    if not found:
        names = ", ".join(cell.name for cell in cells)
        raise DraftwellError(
            f"cell: no cell is named {pattern}: choose from {names}", code="unknown_cell"
        )
    return found
