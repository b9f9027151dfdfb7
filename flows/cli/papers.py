"""`draftwell papers`: the papers' tables, measured here, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    Threads,
    check_folder,
    pick_device,
    say,
    set_threads,
)
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.papers.cell_file import CellFile
    from draftwell.components.papers.cells import Cell


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(papers)


def papers(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Few prompts and few tokens: sized for 20 minutes on two cores."
        ),
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            "--only", help="Measure one paper: spide, sprinter, csd, pyramidsd or duodecoding."
        ),
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option(
            "--cell",
            help="Measure the cells of this name only, such as csd-code or 'spide-counts-*'.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help=(
                "Folder of the measured cells, which a second run skips. Default: "
                "$DRAFTWELL_HOME/papers."
            ),
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--page",
            help="Markdown file to write, with pictures in images/ next to it. Default, in the "
            "folder: papers.md; papers-shipped.md "
            "without --data; papers-quick.md; papers-padded-7b.md with --pad-target 7e9.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help=(
                "Folder with the papers' data sets, such as humaneval.jsonl. Default: shipped "
                "prompts of the same kind."
            ),
        ),
    ] = None,
    pad_target: Annotated[
        float | None,
        typer.Option(
            "--pad-target",
            min=1.0,
            help="Parameters that targets are padded to, 1.1e9 by default. Another number is a "
            "run, and a page, of "
            "its own, without the tables that are counted by replay: padding changes no count.",
        ),
    ] = None,
    render: Annotated[
        bool, typer.Option("--render", help="Measure nothing: write the page from what is there.")
    ] = False,
    kept: Annotated[
        bool,
        typer.Option(
            "--kept",
            help="Measure nothing: write the page from the cells that the project keeps alone, "
            "as docs/papers.md is, and "
            "docs/papers-gpu.md with --pad-target 7e9.",
        ),
    ] = False,
    publish: Annotated[
        bool,
        typer.Option(
            "--publish/--no-publish",
            help="Also keep the page and its pictures in MLflow, where there is a registry.",
        ),
    ] = True,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: Threads = None,
) -> None:
    """Run the tables of SPIDE, SPRINTER, CSD, PyramidSD and DuoDecoding here, and write a page with
    both values.

    Example: draftwell papers --quick --only spide --out papers
    """
    import torch

    from draftwell.components.papers.catalogue import papers_named
    from draftwell.components.papers.cells import FULL, QUICK, padding_name
    from draftwell.components.papers.committed import with_committed
    from draftwell.components.papers.runner import Run, measured_cells, run_cells
    from draftwell.components.papers.tables import without_replayed
    from draftwell.components.report.drawing import check_drawing
    from draftwell.flows.steps.papers import (
        Page,
        counts_of,
        log_page,
        made_of,
        open_cells,
        own_format,
    )
    from draftwell.serving.artifacts.pair_files import draftwell_home
    from draftwell.serving.device import device_class

    # what is there of others is shown
    chosen, everything, scale = papers_named(only), papers_named(None), QUICK if quick else FULL
    if pad_target not in (None, scale.pad_target):
        chosen, everything = (
            list(map(without_replayed, chosen)),
            list(map(without_replayed, everything)),
        )
        scale = replace(scale, pad_target=pad_target)
    if out is not None:
        check_folder(out)
    if data is not None and not data.is_dir():
        raise DraftwellError(
            f"--data: there is no folder {data}: docs/papers.md says what to download into "
            "it, or leave --data out to "
            "take the shipped prompts",
            code="no_data",
        )
    check_drawing()
    on = pick_device(device)
    number_format = dtype.value if dtype else own_format(on)
    set_threads(threads)
    patience = scale.patience if on == "cpu" else 0.0
    folder, count = out or draftwell_home() / "papers", torch.get_num_threads()
    run = Run(
        folder / scale.name,
        f"{number_format} on {device_class(on)}, {count} threads",
        data,
        lambda cell: made_of(cell, number_format, on, say),
        patience,
        scale.times,
    )
    marks = "papers", padding_name(pad_target), "quick" if quick else "" if data else "shipped"
    shown = Page(page or folder / f"{'-'.join(filter(None, marks))}.md", everything, scale)

    def own() -> dict[str, CellFile]:
        """What this run has."""
        return {} if kept else measured_cells(shown.cells, run)

    failed: dict[str, str] = {}

    def show(fresh: Cell | None, failures: Mapping[str, str]) -> list[Path]:
        failed.update(failures)
        return shown.write(with_committed(own(), shown.cells), failed, fresh)

    try:
        if not (render or kept):
            cells = cells_named(
                list(
                    {
                        table.cell.name: table.cell
                        for paper in chosen
                        for table in paper.tables(scale)
                    }.values()
                ),
                cell,
            )
            run_cells(
                cells,
                run,
                lambda together: open_cells(together, number_format, on, say, patience),
                say=say,
                after=show,
            )
    finally:
        pictures = show(None, {})
    if publish and (logged := log_page(shown, pictures)):
        say(f"the page and its pictures are in MLflow: {logged}")
    here = own()
    say(
        f"{counts_of(shown.cells, here, with_committed(here, shown.cells))}; the page is "
        f"{shown.path}"
    )
    if failed:
        raise typer.Exit(1)


def cells_named(cells: Sequence[Cell], pattern: str | None) -> list[Cell]:
    """The cells whose names match a pattern, all of them without one.

    Raises:
        DraftwellError: none does.
    """
    found = [cell for cell in cells if pattern is None or fnmatch(cell.name, pattern)]
    if not found:
        names = ", ".join(cell.name for cell in cells)
        raise DraftwellError(
            f"--cell: no cell is named {pattern}: choose from {names}", code="unknown_cell"
        )
    return found
