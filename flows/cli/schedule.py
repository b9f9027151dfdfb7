"""`draftwell schedule`: flows that run by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.options import DtypeOption, Pair, say, wide_console
from serving.errors import DraftwellError


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(schedule)


def schedule(pair: Pair = "default",
             prompts: Annotated[Path | None, typer.Option("--prompts", help="Your own prompts instead of the shipped.")] = None,
             device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu", dtype: DtypeOption = None,
             settings: Annotated[list[str] | None, typer.Option(
                 "--set", help="Any setting of the flows, such as --set trials=200 or --set spool=/srv/spool; repeatable.")] = None,
             gpu_slots: Annotated[int | None, typer.Option(
                 "--gpu-slots", min=1, help="Flows that may compute at once, over all pairs; 1 at first, later what it is.")] = None,
             file: Annotated[Path, typer.Option("--file", help="Deployments, with their hours.")] = Path("prefect.yaml")) -> None:
    """Make work pool, limits and deployments for a pair on a Prefect server: collection, calibration, tuning, release, monitoring.

    May be run again, after a change of prefect.yaml too. It needs a server (`make prefect-server`), and a worker to run anything
    (`make worker`).

    Example: draftwell schedule --pair default
    """
    from rich.table import Table

    from flows.orchestration import deployments as schedules

    wanted = read_settings(pair, prompts, device, dtype, settings or [])
    say("deploying to Prefect (about 20 s)")
    made = schedules.schedule(wanted, file, gpu_slots=gpu_slots)
    table = Table("deployment", "runs", title="scheduled")
    for row in made.deployments:
        table.add_row(row.name, row.when)
    console = wide_console()
    console.print(table)
    for name, kind in made.pools.items():
        console.print(f"work pool {name} ({kind}); one worker at least must run: make worker", soft_wrap=True)
    console.print("limits: " + ", ".join(f"{name} = {slots}" for name, slots in made.limits.items()), soft_wrap=True)
    if made.forgets_turns:
        console.print("this server keeps turns in memory: started again while a flow runs, it never gives the turn back. Start it with "
                      f"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={schedules.KEPT_TURNS}, as `make prefect-server` does", soft_wrap=True)
    console.print(f"UI: {made.ui}", soft_wrap=True)


def read_settings(pair: str, prompts: Path | None, device: str, dtype: str | None, others: list[str]) -> dict[str, Any]:
    """The flows' settings by name; the flows check them. Folders and files are whole, because a worker may start elsewhere."""
    from flows.settings import PLACES
    from flows.workspace import parse_settings

    if prompts is not None and not prompts.exists():
        raise DraftwellError(f"there is no {prompts}: check --prompts")
    given: dict[str, Any] = {"pair": pair, "device": device, **parse_settings(others)}
    given |= {name: str(Path(place).expanduser().absolute()) for name, place in given.items() if name in PLACES and name != "prompts"}
    given |= {"prompts": str(prompts.absolute())} if prompts is not None else {}
    given |= {"dtype": str(dtype)} if dtype is not None else {}
    return given
