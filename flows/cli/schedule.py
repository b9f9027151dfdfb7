"""`draftwell schedule`: flows that a Prefect server starts on a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    Pair,
    release_device,
    say,
    wide_console,
)
from draftwell.serving.errors import DraftwellError


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(schedule)


def schedule(
    pair: Pair = "default",
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help=(
                "JSONL of prompts, used until there is served traffic. Default: the shipped "
                "prompts."
            ),
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help=(
                "A setting of the flows, such as --set trials=200 or --set spool=/srv/spool; "
                "repeatable."
            ),
        ),
    ] = None,
    gpu_slots: Annotated[
        int | None,
        typer.Option(
            "--gpu-slots",
            min=1,
            help="Flows that may compute at the same time, over all pairs. Default: keep "
            "the server's limit, which starts at 1.",
        ),
    ] = None,
    file: Annotated[
        Path, typer.Option("--file", help="YAML file of the deployments and their schedules.")
    ] = Path("prefect.yaml"),
) -> None:
    """Create the work pool, limits, automations and deployments of a pair on a Prefect server.

    Safe to run again, for example after a change of prefect.yaml or an upgrade. Needs a server
    (`make prefect-server`); flows run only while a worker does (`make worker`).

    Example: draftwell schedule --pair default
    """
    from rich.table import Table

    from draftwell.flows.orchestration import deployments as schedules

    wanted = read_settings(pair, prompts, release_device(device), dtype, settings or [])
    say("deploying to Prefect (about 20 s)")
    made = schedules.schedule(wanted, file, gpu_slots=gpu_slots)
    table = Table("deployment", "runs", title="scheduled")
    for row in made.deployments:
        table.add_row(row.name, row.when)
    console = wide_console()
    console.print(table)
    for name, kind in made.pools.items():
        console.print(
            f"work pool {name} ({kind}); flows run only while a worker does: make worker",
            soft_wrap=True,
        )
    console.print(
        "limits: " + ", ".join(f"{name} = {slots}" for name, slots in made.limits.items()),
        soft_wrap=True,
    )
    for name in made.replaced:
        console.print(f"replaced {name}, whose name had no device", soft_wrap=True)
    console.print("automations: " + ", ".join(made.automations), soft_wrap=True)
    if made.forgets_leases:
        console.print(
            "this server keeps concurrency leases in memory: if it restarts while a flow "
            "runs, the slot "
            "stays taken. Start it with "
            f"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={schedules.KEPT_LEASES}, as `make "
            "prefect-server` does",
            soft_wrap=True,
        )
    console.print(f"UI: {made.ui}", soft_wrap=True)


def read_settings(
    pair: str, prompts: Path | None, device: str, dtype: str | None, others: list[str]
) -> dict[str, Any]:
    """The flows' settings by name; the flows check them. Folders and files are whole, because a
    worker may start elsewhere."""
    from draftwell.flows.settings import PLACES
    from draftwell.flows.workspace import parse_settings

    if prompts is not None and not prompts.exists():
        raise DraftwellError(f"there is no {prompts}: check --prompts")
    given: dict[str, Any] = {"pair": pair, "device": device, **parse_settings(others)}
    given |= {
        name: str(Path(place).expanduser().absolute())
        for name, place in given.items()
        if name in PLACES and name != "prompts"
    }
    given |= {"prompts": str(prompts.absolute())} if prompts is not None else {}
    given |= {"dtype": str(dtype)} if dtype is not None else {}
    return given
