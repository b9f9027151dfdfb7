"""`draftwell monitor`: is the traffic still the one that the champion was calibrated on?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    EngineName,
    EngineOption,
    Pair,
    Threads,
    check_folder,
    release_device,
    say,
    wide_console,
)
from draftwell.serving.errors import DraftwellError

DRIFT = 3
"""Exit code of drift; 0 is none, or not enough traffic yet, 2 a mistake."""

OF_RECALIBRATE = ("prompts", "restart", "minutes", "methods", "levels", "threads", "fresh")
"""Options that go with --recalibrate alone."""


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(monitor)


def monitor(
    context: typer.Context,
    pair: Pair = "default",
    spool: Annotated[
        Path | None,
        typer.Option(
            "--spool",
            help=(
                "Folder of recorded requests, which a server writes. Default: "
                "$DRAFTWELL_HOME/spool/<pair>."
            ),
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference",
            help="Traces to compare with. Default: those that the champion was calibrated on.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Folder for drift.json, drift.md and the plots. Default: the workspace's reports.",
        ),
    ] = None,
    limits: Annotated[
        Path | None,
        typer.Option("--limits", help="YAML file of limits. Default: registry/drift.yaml."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of bundles, to see what is served.")
    ] = Path("dist"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    engine: EngineOption = EngineName.draftwell,
    recalibrate: Annotated[
        bool,
        typer.Option(
            "--recalibrate",
            help="With --engine vllm: where there is drift, tune again on recorded prompts, "
            "gate, deploy after a "
            "trial, and restart what serves.",
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help=(
                "With --recalibrate: file or folder of recorded requests (JSONL). Default: "
                "those in the spool."
            ),
        ),
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(
            "--restart",
            help="With --recalibrate: command of a shell that restarts the servers. Default: "
            "processes of the new bundle "
            "take the place of those that you run on this machine.",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=1.0, help="With --recalibrate: for all of it.")
    ] = 45.0,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help=(
                "With --recalibrate: ways to speculate, with commas. Default: all that are "
                "possible."
            ),
        ),
    ] = None,
    levels: Annotated[
        str,
        typer.Option("--levels", help="With --recalibrate: requests at once that are measured."),
    ] = "1,8",
    threads: Threads = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="With --recalibrate: tune and judge again, also on prompts of an earlier one.",
        ),
    ] = False,
) -> None:
    """Compare served traffic with what the champion was calibrated on; exit code 3 if it has
    drifted, 2 on an error, else 0.

    With --engine vllm, what our plug-in counted of drafts in vLLM is compared with the tuning.

    Only reports: the deployed flow of the same name announces a drift, and another recalibrates
    (docs/drift.md). With --engine vllm --recalibrate it answers drift itself; then the exit code is
    the gate's where it did not pass (1 failed, 3 not enough evidence), else 0.

    Example: draftwell monitor --pair default --spool .draftwell/spool/smollm2-135m
    """
    import json

    from draftwell.components.drift.report import drift_json, drift_table
    from draftwell.flows.cli.engine import monitor_elsewhere, named, refuse_options
    from draftwell.flows.cli.recalibrate_engine import recalibrate_elsewhere
    from draftwell.flows.cli.release import EXIT_FAILED, EXIT_UNDECIDED
    from draftwell.flows.steps import monitor as monitor_step
    from draftwell.flows.steps.engine.recalibrate import REFUSED, UNDECIDED_STATE, said_of
    from draftwell.flows.workspace import Workspace

    if refuse_options(
        context,
        engine,
        ("spool", "limits", "as_json", "out", "recalibrate", *OF_RECALIBRATE),
        only_elsewhere=("recalibrate", *OF_RECALIBRATE),
    ):
        if recalibrate:
            outcome = recalibrate_elsewhere(
                pair,
                dtype,
                device,
                spool=spool,
                limits=limits,
                out=out,
                prompts=prompts,
                restart=restart,
                minutes=minutes,
                methods=methods,
                levels=levels,
                threads=threads,
                fresh=fresh,
            )
            typer.echo(json.dumps(outcome, indent=2) if as_json else said_of(outcome))
            raise typer.Exit(
                {REFUSED: EXIT_FAILED, UNDECIDED_STATE: EXIT_UNDECIDED}.get(outcome["state"], 0)
            )
        if wrong := next((name for name in OF_RECALIBRATE if named(context, name)), None):
            raise DraftwellError(
                f"--{wrong} means nothing without --recalibrate: name both, or leave it out",
                code="engine_option",
            )
        found = monitor_elsewhere(pair, dtype, device, spool=spool, limits=limits, out=out)
        typer.echo(
            json.dumps(found.model_dump(mode="json"), indent=2)
            if as_json
            else f"{found.verdict}: {found.why}"
        )
        raise typer.Exit(DRIFT if found.drifted else 0)
    if report is not None:
        check_folder(report)
    on = release_device(device)
    space = Workspace(pair, dtype, say, on)
    found_here, _ = monitor_step.check(
        space,
        spool=monitor_step.spool_of(space, spool),
        device=on,
        reference=reference,
        out=out,
        limits=None if limits is None else monitor_step.load_limits(limits),
    )
    files = monitor_step.write_report(found_here, report or space.device_reports / "drift")
    if as_json:
        typer.echo(json.dumps(drift_json(found_here), indent=2, allow_nan=False))
    else:
        wide_console().print(drift_table(found_here))
        typer.echo(str(files[1]))
    if found_here.drifted:
        raise typer.Exit(DRIFT)
