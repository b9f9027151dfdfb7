"""`draftwell monitor`: is the traffic still the one that the champion was calibrated on?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import DeviceOption, DtypeOption, EngineName, EngineOption, Pair, check_folder, release_device, say, wide_console

DRIFT = 3
"""Exit code of drift; 0 is none, or not enough traffic yet, 2 a mistake."""


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(monitor)


def monitor(context: typer.Context, pair: Pair = "default",
            spool: Annotated[Path | None, typer.Option(
                "--spool", help="Folder of recorded requests, which a server writes. Default: $DRAFTWELL_HOME/spool/<pair>.")] = None,
            reference: Annotated[Path | None, typer.Option(
                "--reference", help="Traces to compare with. Default: those that the champion was calibrated on.")] = None,
            report: Annotated[Path | None, typer.Option(
                "--report", help="Folder for drift.json, drift.md and the plots. Default: the workspace's reports.")] = None,
            limits: Annotated[Path | None, typer.Option("--limits", help="YAML file of limits. Default: registry/drift.yaml.")] = None,
            as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
            out: Annotated[Path, typer.Option("--out", help="Folder of bundles, to see what is served.")] = Path("dist"),
            device: DeviceOption = None,
            dtype: DtypeOption = None,
            engine: EngineOption = EngineName.draftwell) -> None:
    """Compare served traffic with what the champion was calibrated on; exit code 3 if it has drifted, 2 on an error, else 0.

    With --engine vllm, what our plug-in counted of drafts in vLLM is compared with the tuning.

    Only reports: the deployed flow of the same name announces a drift, and another recalibrates (docs/drift.md).

    Example: draftwell monitor --pair default --spool .draftwell/spool/smollm2-135m
    """
    import json

    from components.drift.report import drift_json, drift_table
    from flows.cli.engine import monitor_elsewhere, refuse_options
    from flows.steps import monitor as monitor_step
    from flows.workspace import Workspace

    if refuse_options(context, engine, ("spool", "limits", "as_json", "out")):
        found = monitor_elsewhere(pair, dtype, device, spool=spool, limits=limits, out=out)
        typer.echo(json.dumps(found.model_dump(mode="json"), indent=2) if as_json else f"{found.verdict}: {found.why}")
        raise typer.Exit(DRIFT if found.drifted else 0)
    if report is not None:
        check_folder(report)
    on = release_device(device)
    space = Workspace(pair, dtype, say, on)
    found_here, _ = monitor_step.check(space, spool=monitor_step.spool_of(space, spool), device=on, reference=reference, out=out,
                                limits=None if limits is None else monitor_step.load_limits(limits))
    files = monitor_step.write_report(found_here, report or space.device_reports / "drift")
    if as_json:
        typer.echo(json.dumps(drift_json(found_here), indent=2, allow_nan=False))
    else:
        wide_console().print(drift_table(found_here))
        typer.echo(str(files[1]))
    if found_here.drifted:
        raise typer.Exit(DRIFT)
