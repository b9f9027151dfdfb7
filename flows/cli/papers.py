"""`draftwell reproduce papers`: the papers' tables, measured here, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    Threads,
    pick_device,
    set_threads,
)

if TYPE_CHECKING:
    pass


Quick = Annotated[
    bool,
    typer.Option("--quick", help="Few prompts and few tokens: sized for 20 minutes on two cores."),
]
Only = Annotated[
    str | None,
    typer.Option(
        "--only", help="Measure one paper: spide, sprinter, csd, pyramidsd or duodecoding."
    ),
]
CellName = Annotated[
    str | None,
    typer.Option(
        "--cell",
        help="Measure the cells of this name only, such as csd-code or 'spide-counts-*'.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help=(
            "Folder of the measured cells, which a second run skips. Default: "
            "$DRAFTWELL_HOME/papers."
        ),
    ),
]
PageFile = Annotated[
    Path | None,
    typer.Option(
        "--page",
        help="Markdown file to write, with pictures in images/ next to it. Default, in the "
        "folder: papers.md; papers-shipped.md "
        "without --data; papers-quick.md; papers-padded-7b.md with --pad-target 7e9.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help=(
            "Folder with the papers' data sets, such as humaneval.jsonl. Default: shipped "
            "prompts of the same kind."
        ),
    ),
]
PadTargets = Annotated[
    float | None,
    typer.Option(
        "--pad-target",
        min=1.0,
        max=1e15,
        help="Parameters that targets are padded to, 1.1e9 by default. Another number is a "
        "run, and a page, of "
        "its own, without the tables that are counted by replay: padding changes no count.",
    ),
]
Render = Annotated[
    bool, typer.Option("--render", help="Measure nothing: write the page from what is there.")
]
Kept = Annotated[
    bool,
    typer.Option(
        "--kept",
        help="Measure nothing: write the page from the cells that the project keeps alone, "
        "as docs/papers.md is, and "
        "docs/papers-gpu.md with --pad-target 7e9.",
    ),
]
Publish = Annotated[
    bool,
    typer.Option(
        "--publish/--no-publish",
        help="Also keep the page and its pictures in MLflow, where there is a registry.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(papers)


def papers(
    quick: Quick = False,
    only: Only = None,
    cell: CellName = None,
    out: Out = None,
    page: PageFile = None,
    data: Data = None,
    pad_target: PadTargets = None,
    render: Render = False,
    kept: Kept = False,
    publish: Publish = True,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: Threads = None,
) -> None:
    """Run the tables of SPIDE, SPRINTER, CSD, PyramidSD and DuoDecoding here, and write a page with
    both values.

    Example: draftwell reproduce papers --quick --only spide --out papers
    """
    from draftwell.flows.cli.papers_run import run_tables

    device, number_format = pick_device(device), dtype.value if dtype else None
    set_threads(threads)
    run_tables(
        quick=quick,
        only=only,
        cell=cell,
        out=out,
        page=page,
        data=data,
        pad_target=pad_target,
        render=render,
        kept=kept,
        publish=publish,
        number_format=number_format,
        device=device,
    )
