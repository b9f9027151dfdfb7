"""`draftwell reproduce papers`: the papers' tables, measured here, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from draftwell.flows.cli.options import (
    DtypeOption,
    ReleaseDevice,
    Threads,
    pick_device,
    set_threads,
)
from draftwell.flows.cli.settings_option import add_command

Quick = Annotated[
    bool,
    Field(description="Few prompts and few tokens: sized for 20 minutes on two cores."),
]
Only = Annotated[
    str | None,
    Field(
        description="Measure one paper: spide, sprinter, csd, pyramidsd or duodecoding; or "
        "emulated: runs on emulated devices, which take two idle cores."
    ),
]
CellName = Annotated[
    str | None,
    Field(description="Measure the cells of this name only, such as csd-code or 'spide-counts-*'."),
]
Out = Annotated[
    Path | None,
    Field(
        description=(
            "Folder of the measured cells, which a second run skips. Default: "
            "$DRAFTWELL_HOME/papers."
        )
    ),
]
PageFile = Annotated[
    Path | None,
    Field(
        description=(
            "Markdown file to write, with pictures in images/ next to it. Default, in the "
            "folder: papers.md; papers-shipped.md "
            "without --data; papers-quick.md; papers-padded-7b.md with pad_target=7e9."
        )
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
    Field(
        ge=1.0,
        le=1e15,
        description=(
            "Parameters that targets are padded to, 1.1e9 by default. Another number is a "
            "run, and a page, of "
            "its own, without the tables that are counted by replay: padding changes no count."
        ),
    ),
]
Render = Annotated[bool, Field(description="Measure nothing: write the page from what is there.")]
Kept = Annotated[
    bool,
    Field(
        description=(
            "Measure nothing: write the page from the cells that the project keeps alone, "
            "as docs/papers.md is, and "
            "docs/papers-gpu.md with pad_target=7e9."
        )
    ),
]
Publish = Annotated[
    bool,
    Field(description="Also keep the page and its pictures in MLflow, where there is a registry."),
]


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, papers)


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
    device: ReleaseDevice = None,
    threads: Threads = None,
) -> None:
    """Run the tables of SPIDE, SPRINTER, CSD, PyramidSD and DuoDecoding here, and write a page with
    both values.

    Example: draftwell reproduce papers --set quick=true --set only=spide
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
