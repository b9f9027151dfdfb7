"""`draftwell schedule`: flows that a Prefect server starts on a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwell.flows.cli.options import (
    DeviceOption,
    Pair,
    Preview,
    release_device,
    say,
    wide_console,
)
from draftwell.flows.cli.settings_option import add_command


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, schedule)


def schedule(
    pair: Pair = "default",
    device: DeviceOption = None,
    file: Annotated[
        Path,
        typer.Option(
            "--settings",
            metavar="FILE",
            help="YAML file of the deployments, their schedules and settings.",
        ),
    ] = Path("prefect.yaml"),
    dry_run: Preview = False,
) -> None:
    """Create the work pool, limits, automation and deployments of a pair on a Prefect server.

    Safe to run again, for example after a change of prefect.yaml or an upgrade. Needs a server
    (`make prefect-server`); flows run only while a worker does (`make worker`).

    Example: draftwell schedule --pair default
    """
    from draftwell.flows.orchestration import deployments  # imports Prefect

    if dry_run:
        for name in deployments.planned(pair, release_device(device), file):
            typer.echo(f"would deploy {name}")
        return
    say("deploying to Prefect (about 20 s)")
    made = deployments.schedule(pair, release_device(device), file)
    limits = ", ".join(f"{name} = {slots}" for name, slots in made.limits.items())
    for line in (
        *made.deployments,
        f"work pool {deployments.POOL}; flows run only while a worker does: make worker",
        f"limits: {limits}",
        f"UI: {made.ui}",
    ):
        wide_console().print(line, soft_wrap=True)
