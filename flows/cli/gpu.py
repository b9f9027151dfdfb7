"""`draftwell reproduce gpu`: everything that is to be known of a GPU, in one run of nine
minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from draftwell.flows.cli.settings_option import add_command


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, gpu)


Out = Annotated[
    Path | None,
    Field(description="Folder of the results, one file a card. Default: gpu in the home."),
]
Kit = Annotated[
    Path,
    Field(description="Folder of what was brought along (`make gpu-kit` fills it)."),
]
Minutes = Annotated[float, Field(ge=0.1, description="Time for the whole run.")]
Only = Annotated[str, Field(description="Parts to measure, with commas. Default: all of them.")]
Page = Annotated[
    Path | None, Field(description="Markdown page to put the table of all results into.")
]


def gpu(
    pair: Annotated[str, Field(description="Name, alias or YAML file of a pair.")] = "default",
    out: Out = None,
    kit: Kit = Path(".draftwell/gpu-kit"),
    minutes: Minutes = 9.0,
    only: Only = "",
    page: Page = None,
) -> None:
    """Measure everything on this machine's GPU, part by part, the most important first. What was
    measured with this code on this card is not measured again. Without CUDA nothing is measured.

    Example: draftwell reproduce gpu --set minutes=9 --set page=docs/gpu.md
    """
    from draftwell.flows.cli.gpu_run import measure_card

    measure_card(pair, out, kit, minutes, only, page)
