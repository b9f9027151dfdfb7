"""The flow that monitors: one check of the newest traffic, shown in Prefect, and the event
`draftwell.drift` where it has changed.

The event's resource is `draftwell.pair.<pair>`; its payload names pair, device, spool, the report's
digest and reasons, and holds under `settings` what `recalibrate` takes. It is sent once for a drift
(`announce_once`).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.events import Event, Resource
from prefect.settings import PREFECT_API_URL
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.flows.failures import disk_full_as_error
from draftwell.flows.orchestration import prefect_artifacts
from draftwell.flows.orchestration.learn_tasks import FLOW, RETRY
from draftwell.flows.progress import announce
from draftwell.flows.steps import monitor as monitor_step
from draftwell.flows.steps.monitor import DriftSettings
from draftwell.flows.workspace import Workspace
from draftwell.serving.files import file_lock, write_json

if TYPE_CHECKING:
    from draftwell.components.drift.schema import DriftReport

EVENT = "draftwell.drift"


class Announced(BaseModel):
    """The drift that was announced last, until its recalibration is deployed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    champion: str = Field(description="what served the traffic")
    digest: str = Field(description="of the report")
    spool: Path
    at: datetime.datetime


def announcement(space: Workspace, device: str) -> Path:
    """The file that remembers an announcement."""
    return space.root / "drift" / f"announced-{device}.json"


def announced(space: Workspace, device: str) -> Announced | None:
    """The drift on a device that is being handled; None where there is none, or nothing that can be
    read."""
    try:
        return Announced.model_validate_json(
            announcement(space, device).read_text(encoding="utf-8")
        )
    except (OSError, ValidationError):
        return None


def announce_once(
    space: Workspace,
    device: str,
    report: DriftReport,
    spool: Path,
    send: Callable[[], bool],
    now: datetime.datetime | None = None,
) -> bool:
    """Announce a drift, unless it was announced for the same champion and is being handled.

    A drift whose traffic went back to what it was is over. One that nothing came of is announced
    again after `repeat_after_hours`.

    Args:
        send: says whether it could be sent; only then it is remembered. Killed in between, it is
            sent twice, never lost.
    Returns:
        whether it was sent now.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    with file_lock(space.root / "drift" / ".lock", wait=False) as free:
        if not free:
            return False  # another check of this pair is just doing it
        if report.verdict == "steady":
            announcement(space, device).unlink(missing_ok=True)
        if not report.drifted:
            return False
        before, patience = (
            announced(space, device),
            datetime.timedelta(hours=report.limits.repeat_after_hours),
        )
        if before is not None and before.champion == report.baseline and now - before.at < patience:
            return False
        if not send():
            return False
        record = Announced(
            champion=report.baseline, digest=report.digest, spool=spool.absolute(), at=now
        )
        write_json(announcement(space, device), record.model_dump(mode="json"))
        return True


@task(name="check for drift", **RETRY)
def check_task(settings: DriftSettings) -> dict[str, Any]:
    """Compare, write the report into the workspace, and announce a new drift; returns the report
    with its digest."""
    from draftwell.components.drift.report import drift_json, headline

    space = Workspace(settings.pair, settings.dtype, announce, settings.device)
    spool = monitor_step.spool_of(space, settings.spool)
    report, champion = monitor_step.check(
        space, spool=spool, device=settings.device, reference=settings.reference, out=settings.out
    )
    announce(headline(report))
    files = monitor_step.write_report(report, space.device_reports / "drift")

    def send() -> bool:
        # first: what cannot be noted is tried again as a whole
        monitor_step.note_in_registry(champion, report)
        payload = {
            "pair": report.pair,
            "device": settings.device,
            "spool": str(spool.absolute()),
            "digest": report.digest,
            "champion": report.baseline,
            "reasons": list(report.reasons),
            "settings": recalibration_settings(settings, spool, report.digest),
        }
        # a server that Prefect starts for this run alone has no automations
        if not PREFECT_API_URL.value():
            announce(
                "drift, but nothing takes events here: set PREFECT_API_URL to a Prefect "
                "server, or run the flow recalibrate by hand"
            )
            return False
        post(report.pair, settings.device, payload)
        return True

    sent = announce_once(space, settings.device, report, spool, send)
    return {**drift_json(report), "announced": sent, "files": [str(file) for file in files]}


@flow(name="monitor", **FLOW)
def monitor(settings: DriftSettings) -> dict[str, Any]:
    """Check whether served traffic still is what the champion was calibrated on.

    Returns:
        verdict, reasons, digest of the report, and whether a drift was announced now.
    """
    with disk_full_as_error():
        found = check_task(settings)
    show(found)
    return {name: found[name] for name in ("pair", "verdict", "reasons", "digest", "announced")}


def post(pair: str, device: str, payload: dict[str, Any]) -> None:
    """Send the event and wait until the server has it: `emit_event` leaves it to a thread that may
    lose it silently.

    Raises:
        httpx.HTTPError: the server is unavailable, or refuses it.
    """
    resource = Resource(
        {
            "prefect.resource.id": resource_of(pair),
            "prefect.resource.name": pair,
            "draftwell.device": device,
        }
    )
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
    """The settings of the recalibration that answers a drift; paths are whole, because a worker may
    start elsewhere."""
    pair = (
        str(Path(settings.pair).absolute())
        if settings.pair.endswith((".yaml", ".yml"))
        else settings.pair
    )
    given = settings.model_dump(mode="json", exclude_unset=True, exclude={"reference"})
    return {
        **given,
        "pair": pair,
        "device": settings.device,
        "spool": str(spool.absolute()),
        "drift": digest,
        "out": str(settings.out.absolute()),
    }


def show(found: dict[str, Any]) -> None:
    """The report as Prefect artifacts: text, the checks as a table, the plots."""
    pair, files = found["pair"], {Path(file).name: Path(file) for file in found["files"]}
    create_markdown_artifact(
        files["drift.md"].read_text(encoding="utf-8"),
        key=prefect_artifacts.key_for("drift", pair),
        description=f"Drift: {found['verdict']}",
    )
    if found["checks"]:
        prefect_artifacts.table(
            "drift-checks",
            pair,
            found["checks"],
            "Each figure against its limit and against chance",
        )
    for file in files.values():
        if file.suffix == ".png":
            prefect_artifacts.picture(
                prefect_artifacts.key_for(file.stem, pair), file, f"{pair}: {file.stem}"
            )
