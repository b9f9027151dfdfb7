"""Commands with which a person steers what is served: release, sync."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    Pair,
    release_device,
    say,
    wide_console,
)
from draftwell.flows.steps.deploy import sync_champion
from draftwell.flows.workspace import Workspace
from draftwell.registry.composing import parse_pins


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    app.command("create")(create)
    app.command()(sync)


def create(
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin",
            help="kind=version, such as verifier=3 or acceptance_table=champion; repeatable. "
            "Default: versions with the alias picked. Other kinds come from the champion, else the "
            "newest.",
        ),
    ] = None,
    pair: Pair = "default",
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Make a candidate of versions picked in MLflow's UI; nothing is trained.

    Example: draftwell release create --pair default --pin verifier=1
    """
    from rich.table import Table

    from draftwell.flows.steps.publish import publish_picked

    device = release_device(device)
    made = publish_picked(Workspace(pair, dtype, say), device, parse_pins(pin or ()))
    table = Table("kind", "version", "from", title=made.release.name)
    for kind, version in made.composition.versions.items():
        table.add_row(kind, str(version.version), made.composition.origin(kind))
    console = wide_console()
    console.print(table)
    for note in made.notes:
        console.print(note, soft_wrap=True)
    champion = made.composition.champion
    if champion is not None and champion.version == made.release.version:
        console.print(
            "these are the champion's own versions: there is nothing new to judge", soft_wrap=True
        )
    else:
        console.print(
            (
                f"{made.release.name} is the candidate; `draftwell gate --pair {pair} --device "
                f"{device}` judges it"
            ),
            soft_wrap=True,
        )


def sync(
    pair: Pair = "default",
    device: DeviceOption = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of bundles.")] = Path("dist"),
) -> None:
    """Deploy the champion that the alias names now, if something else is served; a running server
    switches.

    The flow of the same name does this every hour. A champion without a passed gate is refused, and
    what serves stays.

    Example: draftwell release sync --pair default
    """

    device = release_device(device)
    done = sync_champion(Workspace(pair, say=say), device, out)
    if done.bundle is not None:
        typer.echo(f"{done.bundle}  ({done.state})")
