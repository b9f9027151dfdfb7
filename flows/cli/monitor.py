"""`draftwell monitor`: is the traffic still the one that the champion was calibrated on; and is an
engine at an address as fast as it was?"""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from pydantic import Field

from draftwell.components.drift.report import drift_json, drift_table
from draftwell.components.engines.remote.address import is_address
from draftwell.flows.cli.engine_options import NEEDED, on_other_engine
from draftwell.flows.cli.options import (
    EXIT_FAILED,
    EXIT_UNDECIDED,
    Bundles,
    DeviceOption,
    DtypeOption,
    EngineOption,
    Fresh,
    Levels,
    Methods,
    Minutes,
    Pair,
    PlainOption,
    Threads,
    check_folder,
    release_device,
    say,
    wide_console,
)
from draftwell.flows.cli.settings_option import add_command, named, spelled
from draftwell.flows.cli.shared_options import ADDRESS, with_options
from draftwell.flows.workspace import Workspace
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.drift.schema import DriftReport

DRIFT = 3
"""Exit code of drift; 0 is none, or not enough traffic yet, 2 a mistake."""


Spool = Annotated[
    Path | None,
    Field(
        description=(
            "Folder of recorded requests, which a server writes. Default: "
            "$DRAFTWELL_HOME/spool/<pair>."
        )
    ),
]
Reference = Annotated[
    Path | None,
    Field(
        description="Traces to compare with. Default: those that the champion was calibrated on."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder of the report."),
]
Limits = Annotated[
    Path | None,
    Field(
        description=(
            "YAML file of limits. Default: registry/drift.yaml; with --engine URL those of "
            "docs/watchdog.md."
        )
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Recalibrate = Annotated[
    bool,
    Field(
        description=(
            "With --engine vllm: where there is drift, tune again on recorded prompts, gate, "
            "deploy after a trial, and restart what serves."
        )
    ),
]
Recorded = Annotated[
    Path | None,
    Field(
        description=(
            "With recalibrate: file or folder of recorded requests (JSONL). Default: those in "
            "the spool."
        )
    ),
]
Restart = Annotated[
    str | None,
    Field(
        description=(
            "With recalibrate: command of a shell that restarts the servers. Default: "
            "nothing is restarted."
        )
    ),
]
Every = Annotated[
    float | None,
    Field(
        ge=1.0,
        description=(
            "With --engine URL: look again and again until ended, and print a line for each "
            "alarm. Default: one look."
        ),
    ),
]
BaselineOption = Annotated[
    str | None,
    Field(
        description=(
            "With --engine URL: a baseline.json to compare with, or new: forget the one that is "
            "there. Default: it is made of the first quiet looks."
        )
    ),
]
ProbesPerHour = Annotated[
    int,
    Field(
        ge=0,
        le=3600,
        description=(
            "With --engine URL: requests of our own that may be sent, which tell an engine that "
            "became worse from traffic that changed."
        ),
    ),
]
MetricsFile = Annotated[
    Path | None,
    Field(
        description=(
            "With --engine URL: write what was found as metrics, for the textfile collector of "
            "Prometheus' node exporter."
        )
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, with_options(monitor, ADDRESS), file=True)


def monitor(
    context: typer.Context,
    pair: Pair = "default",
    spool: Spool = None,
    reference: Reference = None,
    out: Out = None,
    limits: Limits = None,
    as_json: AsJson = False,
    bundles: Bundles = Path("dist"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    engine: EngineOption = "draftwell",
    recalibrate: Recalibrate = False,
    prompts: Recorded = None,
    restart: Restart = None,
    minutes: Minutes = 45.0,
    methods: Methods = None,
    levels: Levels = (1, 8),
    threads: Threads = None,
    fresh: Fresh = False,
    plain: PlainOption = None,
    every: Every = None,
    baseline: BaselineOption = None,
    probes_per_hour: ProbesPerHour = 0,
    metrics_file: MetricsFile = None,
) -> None:
    """Compare served traffic with what the champion was calibrated on; exit code 3 if it has
    drifted, 2 on an error, else 0.

    With --engine vllm, what our plug-in counted of drafts is compared with the tuning; with
    recalibrate=true it answers drift, and the exit code is the gate's. With --engine URL, its
    metrics are compared with those of when it was well (docs/watchdog.md).

    Example: draftwell monitor --pair default --set spool=.draftwell/spool/smollm2-135m
    """
    other = on_other_engine(context)
    if is_address(engine):
        watch_address(context)
    if not other:
        show(*check_own(context), as_json)
    if recalibrate:
        answer_elsewhere(context)
    show(check_elsewhere(context), None, as_json)


def check_elsewhere(context: typer.Context) -> DriftReport:
    """What another engine served, compared."""
    from draftwell.flows.cli.engine import monitor_elsewhere

    needed = NEEDED["restart"]["monitor"]
    if wrong := next((name for name in needed if named(context, name)), None):
        raise DraftwellError(
            f"{spelled(context, wrong)} means nothing without recalibrate=true: name both, or "
            f"leave "
            "it out",
            code="engine_option",
        )
    return monitor_elsewhere(context)


def watch_address(context: typer.Context) -> NoReturn:
    """Look at an engine at an address, once or until it is ended."""
    from draftwell.flows.cli.remote import address_of
    from draftwell.flows.cli.watch import watch_on, watch_once
    from draftwell.flows.steps.remote.watch import open_watch

    given = context.params
    address = address_of(context)
    assert address is not None
    watch = open_watch(
        address,
        address_of(context, "plain"),
        limits=given["limits"],
        baseline=given["baseline"],
        probes_per_hour=given["probes_per_hour"],
    )
    if given["every"] is None:
        watch_once(watch, given["metrics_file"], given["as_json"])
    watch_on(watch, given["every"], given["metrics_file"], given["as_json"])


def check_own(context: typer.Context) -> tuple[DriftReport, Path]:
    """What our own engine served, compared, and the report's file."""
    from draftwell.flows.steps import monitor as step

    given = context.params
    folder: Path | None = given["out"]
    if folder is not None:
        check_folder(folder)
    on = release_device(given["device"])
    space = Workspace(given["pair"], given["dtype"], say, on)
    found, _ = step.check(
        space,
        spool=step.spool_of(space, given["spool"]),
        device=on,
        reference=given["reference"],
        out=given["bundles"],
        limits=step.load_limits(given["limits"]),
    )
    return found, step.write_report(found, folder or space.device_reports / "drift")[1]


def show(report: DriftReport, file: Path | None, as_json: bool) -> NoReturn:
    """Print a report, and end with its exit code."""

    if as_json:
        typer.echo(dumps(drift_json(report), indent=2, allow_nan=False))
    else:
        wide_console().print(drift_table(report))
        if file is not None:
            typer.echo(str(file))
    raise typer.Exit(DRIFT if report.drifted else 0)


def answer_elsewhere(context: typer.Context) -> NoReturn:
    """Check another engine, and answer drift; the exit code is the gate's where it did not pass."""
    from draftwell.flows.cli.engine import recalibrate_elsewhere
    from draftwell.flows.steps.engine.recalibrate import said_of

    outcome = recalibrate_elsewhere(context)
    typer.echo(dumps(outcome, indent=2) if context.params["as_json"] else said_of(outcome))
    codes = {"refused": EXIT_FAILED, "undecided": EXIT_UNDECIDED}
    raise typer.Exit(codes.get(outcome["state"], 0))
