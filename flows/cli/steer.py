"""Commands with which a person steers what is served: release, sync."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwell.flows.cli.options import (
    Bundles,
    DtypeOption,
    Pair,
    Preview,
    ReleaseDevice,
    release_device,
    say,
    wide_console,
)
from draftwell.flows.cli.settings_option import add_command
from draftwell.flows.steps.deploy import sync_champion
from draftwell.flows.workspace import Workspace
from draftwell.registry.composing import compose, parse_pins
from draftwell.registry.store import Store

if TYPE_CHECKING:
    from rich.table import Table

    from draftwell.registry.composing import Composition


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    add_command(app, create)
    add_command(app, sync)


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
    device: ReleaseDevice = None,
    dtype: DtypeOption = None,
    dry_run: Preview = False,
) -> None:
    """Make a candidate of versions picked in MLflow's UI; nothing is trained.

    Example: draftwell release create --pair default --pin verifier=1
    """
    from draftwell.flows.steps.publish import publish_picked

    device = release_device(device)
    space, pins = Workspace(pair, dtype, say), parse_pins(pin or ())
    if dry_run:
        chosen = compose(Store(), space.spec.name, device, pins)
        wide_console().print(table_of(chosen, f"would be release.{space.spec.name}.{device}"))
        return
    made = publish_picked(space, device, pins)
    console = wide_console()
    console.print(table_of(made.composition, made.release.name))
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


def table_of(chosen: Composition, title: str) -> Table:
    """The versions of a release, and where each comes from."""
    from rich.table import Table

    table = Table("kind", "version", "from", title=title)
    for kind, version in chosen.versions.items():
        table.add_row(kind, str(version.version), chosen.origin(kind))
    return table


def sync(
    pair: Pair = "default",
    device: ReleaseDevice = None,
    bundles: Bundles = Path("dist"),
    dry_run: Preview = False,
) -> None:
    """Deploy the champion that the alias names now, if something else is served; a running server
    switches.

    The flow of the same name does this every hour. A champion without a passed gate is refused, and
    what serves stays.

    Example: draftwell release sync --pair default
    """

    device = release_device(device)
    done = sync_champion(Workspace(pair, say=say), device, bundles, dry_run=dry_run)
    if done.bundle is not None:
        typer.echo(f"{done.bundle}  ({done.state})")
