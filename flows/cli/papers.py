"""`draftwell papers`: the papers' tables, measured here, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import DeviceOption, DtypeOption, Threads, check_folder, pick_device, say, set_threads
from serving.errors import DraftwellError


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(papers)


def papers(
    quick: Annotated[bool, typer.Option("--quick", help="Few prompts and few tokens: sized for 20 minutes on two cores.")] = False,
    only: Annotated[str | None, typer.Option("--only", help="Measure one paper: spide, sprinter, csd, pyramidsd or duodecoding.")] = None,
    out: Annotated[Path | None, typer.Option(
        "--out", help="Folder of the measured cells, which a second run skips. Default: $DRAFTWELL_HOME/papers.")] = None,
    page: Annotated[Path | None, typer.Option(
        "--page", help="Markdown file to write, with pictures in images/ next to it. Default: papers.md or papers-quick.md in the folder."
    )] = None,
    data: Annotated[Path | None, typer.Option(
        "--data", help="Folder with the papers' data sets, such as humaneval.jsonl. Default: shipped prompts of the same kind.")] = None,
    render: Annotated[bool, typer.Option("--render", help="Measure nothing: write the page from what is there.")] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: Threads = None,
) -> None:
    """Run the tables of SPIDE, SPRINTER, CSD, PyramidSD and DuoDecoding here, and write a page with both values.

    Example: draftwell papers --quick --only spide --out papers
    """
    import torch

    from components.papers.catalogue import papers_named
    from components.papers.cells import FULL, QUICK
    from components.papers.runner import Run, measured_cells, run_cells
    from flows.steps.papers import counts_of, made_of, open_cells, own_format, write_page
    from serving.artifacts.pair_files import draftwell_home
    from serving.device import device_class

    chosen, scale = papers_named(only), QUICK if quick else FULL
    if out is not None:
        check_folder(out)
    if data is not None and not data.is_dir():
        raise DraftwellError(f"--data: there is no folder {data}", code="no_data")
    on = pick_device(device)
    number_format = dtype.value if dtype else own_format(on)
    cells = list({table.cell.name: table.cell for paper in chosen for table in paper.tables(scale)}.values())
    folder = (out or draftwell_home() / "papers") / scale.name
    set_threads(threads)
    where = f"{number_format} on {device_class(on)}, {torch.get_num_threads()} threads"
    measuring = Run(folder, where, data, lambda cell: made_of(cell, number_format, on, say))
    failed: dict[str, str] = {}
    if not render:
        failed = run_cells(cells, measuring, lambda together: open_cells(together, number_format, on, say), say=say)
    everything = papers_named(None)  # what was measured of the other papers stays on the page
    shown = list({table.cell.name: table.cell for paper in everything for table in paper.tables(scale)}.values())
    found = measured_cells(shown, measuring)
    target = page or folder.parent / f"papers{'-quick' if quick else ''}.md"
    write_page(target, everything, scale, found, failed)
    say(f"{counts_of(shown, found)}; the page is {target}")
    if failed:
        raise typer.Exit(1)
