"""`draftwell reproduce import`: what `draftwell reproduce gpu` measured on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwell.flows.cli.options import Pair, say
from draftwell.flows.cli.settings_option import add_command
from draftwell.flows.workspace import Workspace


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, import_results, "import")


def import_results(
    file: Annotated[Path, typer.Argument(help="Results that `make gpu` wrote.")],
    pair: Pair = "default",
) -> None:
    """Take what was tuned and measured on a card into this machine's workspace, and register it as
    the candidate for CUDA. The gate then judges that by the card's figures.

    Example: draftwell reproduce import .draftwell/gpu/smollm2-135m-cuda-nvidia-h200.json
    """
    from draftwell.components.bench.gpu.results import read_results
    from draftwell.flows.steps import imported

    results = read_results(file)
    made = imported.import_results(Workspace(pair, None, say, imported.DEVICE), results)
    typer.echo(
        f"{made.name} is the candidate, from {results.card.name}: `draftwell gate --pair {pair} "
        f"--device {made.device}` judges it"
    )
