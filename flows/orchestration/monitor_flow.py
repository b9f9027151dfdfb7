"""The flow that monitors: one check of the newest traffic, shown in Prefect, and the event `draftwell.drift` where it has changed.

The event's resource is `draftwell.pair.<pair>`; its payload names pair, device, spool, the report's digest and reasons, and holds under
`settings` what `recalibrate` takes. It is sent once for a drift (`drift_events.announce_once`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.events import Event, Resource
from prefect.settings import PREFECT_API_URL

from flows.failures import disk_full_as_error
from flows.orchestration import prefect_artifacts
from flows.orchestration.drift_events import announce_once
from flows.orchestration.learn_tasks import RESULT, RETRY
from flows.progress import announce
from flows.steps import monitor as monitor_step
from flows.steps.monitor import DriftSettings
from flows.workspace import Workspace

EVENT = "draftwell.drift"


@task(name="check for drift", **RETRY)
def check_task(settings: DriftSettings) -> dict[str, Any]:
    """Compare, write the report into the workspace, and announce a new drift; returns the report with its digest."""
    from components.drift.report import drift_json, headline

    space = Workspace(settings.pair, settings.dtype, announce)
    spool = monitor_step.spool_of(space, settings.spool)
    report, champion = monitor_step.check(space, spool=spool, device=settings.device, reference=settings.reference)
    announce(headline(report))
    files = monitor_step.write_report(report, space.reports / "drift")

    def send() -> bool:
        monitor_step.note_in_registry(champion, report)  # first: what cannot be noted is tried again as a whole
        payload = {"pair": report.pair, "device": settings.device, "spool": str(spool.absolute()), "digest": report.digest,
                   "champion": report.baseline, "reasons": list(report.reasons),
                   "settings": recalibration_settings(settings, spool, report.digest)}
        if not PREFECT_API_URL.value():  # a server that Prefect starts for this run alone has no automations
            announce("drift, but nothing takes events here: set PREFECT_API_URL to a Prefect server, or run the flow recalibrate by hand")
            return False
        post(report.pair, payload)
        return True

    sent = announce_once(space, settings.device, report, spool, send)
    return {**drift_json(report), "announced": sent, "files": [str(file) for file in files]}


@flow(name="monitor", log_prints=True, validate_parameters=True, **RESULT)
def monitor(settings: DriftSettings) -> dict[str, Any]:
    """Check whether served traffic still is what the champion was calibrated on.

    Returns:
        verdict, reasons, digest of the report, and whether a drift was announced now.
    """
    with disk_full_as_error():
        found = check_task(settings)
    show(found)
    return {name: found[name] for name in ("pair", "verdict", "reasons", "digest", "announced")}


def post(pair: str, payload: dict[str, Any]) -> None:
    """Send the event and wait until the server has it: `emit_event` leaves it to a thread that may lose it silently.

    Raises:
        httpx.HTTPError: the server is unavailable, or refuses it.
    """
    resource = Resource({"prefect.resource.id": resource_of(pair), "prefect.resource.name": pair})
    event = Event(event=EVENT, resource=resource, payload=payload)
    with get_client(sync_client=True) as client:
        client.request("POST", "/events", json=[event.model_dump(mode="json")])


def resource_of(pair: str) -> str:
    """The resource of a pair's events.

    >>> resource_of("smollm2-135m")
    'draftwell.pair.smollm2-135m'
    """
    return f"draftwell.pair.{pair}"


def recalibration_settings(settings: DriftSettings, spool: Path, digest: str) -> dict[str, Any]:
    """The settings of the recalibration that answers a drift; paths are whole, because a worker may start elsewhere."""
    pair = str(Path(settings.pair).absolute()) if settings.pair.endswith((".yaml", ".yml")) else settings.pair
    given = settings.model_dump(mode="json", exclude_unset=True, exclude={"reference"})
    return {**given, "pair": pair, "spool": str(spool.absolute()), "drift": digest, "out": str(settings.out.absolute())}


def show(found: dict[str, Any]) -> None:
    """The report as Prefect artifacts: text, the checks as a table, the plots."""
    pair, files = found["pair"], {Path(file).name: Path(file) for file in found["files"]}
    create_markdown_artifact(files["drift.md"].read_text(encoding="utf-8"), key=prefect_artifacts.key_for("drift", pair),
                             description=f"Drift: {found['verdict']}")
    if found["checks"]:
        prefect_artifacts.table("drift-checks", pair, found["checks"], "Each figure against its limit and against chance")
    for file in files.values():
        if file.suffix == ".png":
            prefect_artifacts.picture(prefect_artifacts.key_for(file.stem, pair), file, f"{pair}: {file.stem}")
