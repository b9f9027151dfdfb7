"""`draftwell reproduce gpu`: everything that is to be known of a GPU, in one run of nine minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwell.flows.cli.options import Pair


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(gpu)


Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder of the results, one file a card. Default: gpu in the home."),
]
Kit = Annotated[
    Path,
    typer.Option("--kit", help="Folder of what was brought along (`make gpu-kit` fills it)."),
]
Minutes = Annotated[float, typer.Option("--minutes", min=0.1, help="Time for the whole run.")]
Only = Annotated[
    str, typer.Option("--only", help="Parts to measure, with commas. Default: all of them.")
]
Page = Annotated[
    Path | None, typer.Option("--page", help="Markdown page to put the table of all results into.")
]


def gpu(
    pair: Pair = "default",
    out: Out = None,
    kit: Kit = Path(".draftwell/gpu-kit"),
    minutes: Minutes = 9.0,
    only: Only = "",
    page: Page = None,
) -> None:
    """Measure everything on this machine's GPU, part by part, the most important first. What was
    measured with this code on this card is not measured again. Without CUDA nothing is measured.

    Example: draftwell reproduce gpu --minutes 9 --page docs/gpu.md
    """
    from draftwell.flows.cli.gpu_run import measure_card

    measure_card(pair, out, kit, minutes, only, page)
