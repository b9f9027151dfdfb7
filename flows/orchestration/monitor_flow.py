"""The small flows beside the loop: `monitor` checks the newest traffic, or an engine at an address,
and sends the event `draftwell.drift` where it has changed; `sync` deploys the champion that a
person named.

The event's resource is `draftwell.pair.<pair>`; its payload names pair, device, the report's digest
and reasons, and holds under `settings` what the flow `draftwell` answers it with. An alarm of an
engine that nothing answers is about `draftwell.engine.<address>`.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.events import Event, Resource
from prefect.settings import PREFECT_API_URL

from draftwell.components.drift.report import drift_json, headline
from draftwell.components.drift.schema import DriftReport
from draftwell.components.watch.report import (
    alarm_line,
    headline as headline_of,
    watch_markdown,
    watch_metrics,
)
from draftwell.components.watch.schema import Alarm
from draftwell.flows.failures import disk_full_as_error
from draftwell.flows.loading import workspace_of
from draftwell.flows.orchestration import assets, run_artifacts as shown
from draftwell.flows.orchestration.task_options import ANEW, FLOW
from draftwell.flows.progress import announce
from draftwell.flows.settings import PipelineSettings, pair_anywhere
from draftwell.flows.steps import monitor as monitor_step
from draftwell.flows.steps.announcement import announce_once
from draftwell.flows.steps.deploy import sync_champion
from draftwell.flows.steps.monitor import DriftSettings
from draftwell.flows.steps.old_traffic import remove_old
from draftwell.flows.steps.remote.alarms import (
    WatchSettings,
    announce_each,
    payload_of,
    resource_of,
)
from draftwell.flows.steps.remote.watch import look
from draftwell.registry.webhooks_out import send_event
from draftwell.serving.files import write_text

EVENT = "draftwell.drift"


@task(name="check for drift", **ANEW)
def check(settings: DriftSettings) -> dict[str, Any]:
    """Compare, write the report into the workspace, and announce a new drift; returns the report
    with its digest."""
    space = workspace_of(settings)
    spool = monitor_step.spool_of(space, settings.spool)
    report, champion = monitor_step.check(
        space, spool=spool, device=settings.device, reference=settings.reference, out=settings.out
    )
    announce(headline(report))
    files = monitor_step.write_report(report, space.device_reports / "drift")

    def send() -> bool:
        # first: what cannot be noted is tried again as a whole
        pictures = [file for file in files if file.suffix == ".png"]
        monitor_step.note_in_registry(champion, report, pictures)
        drift = {"champion": report.baseline, "reasons": list(report.reasons)}
        about = {"pair": report.pair, "device": settings.device, "digest": report.digest}
        # a server that Prefect starts for this run alone has no automations
        if reached := bool(PREFECT_API_URL.value()):
            post(settings, report, spool)
        else:
            announce(
                "drift, but nothing takes events here: set PREFECT_API_URL to a Prefect server, or "
                "run the flow draftwell with source=drift by hand"
            )
        return send_event("traffic.drifted", {**about, **drift}, report.digest) or reached

    sent = announce_once(space, settings.device, report, spool, send)
    for folder in remove_old(space, settings.out, report.limits.keep_days):
        announce(f"older than {report.limits.keep_days:g} days and not in use: deleted {folder}")
    return {**drift_json(report), "announced": sent, "files": [str(file) for file in files]}


@task(name="look at the engine", **ANEW)
def look_at(settings: WatchSettings) -> dict[str, Any]:
    """Look once, and announce each alarm that is new; returns the report."""
    with closing(settings.open()) as watch:
        report = look(watch)
    announce(headline_of(report))
    if settings.metrics_file is not None:
        write_text(settings.metrics_file, watch_metrics(report))

    def send(alarm: Alarm) -> bool:
        announce(alarm_line(alarm))
        payload = payload_of(settings, report, alarm)
        told = {name: value for name, value in payload.items() if name != "settings"}
        if reached := bool(PREFECT_API_URL.value()):
            post_event(resource_of(settings, payload), payload)
        else:
            announce("nothing takes events here: set PREFECT_API_URL to a Prefect server")
        mark = f"{report.engine} {alarm.cause} {alarm.since}"
        return send_event("engine.alarm", told, mark) or reached

    sent, ended = announce_each(watch, report, send)
    for cause in ended:
        announce(f"{report.engine}: {cause.replace('_', ' ')} has ended")
    return {
        **report.model_dump(mode="json"),
        "digest": report.digest,
        "announced": [alarm.cause for alarm in sent],
        "page": watch_markdown(report),
    }


@flow(name="monitor", **FLOW)
def monitor(settings: DriftSettings | WatchSettings) -> dict[str, Any]:
    """Check whether served traffic still is what the champion was calibrated on; or, where `engine`
    is an address, whether the engine there is as fast as it was.

    Returns:
        verdict, reasons, digest of the report, and whether a drift was announced now; of an engine
        at an address the causes that were.
    """
    if isinstance(settings, WatchSettings):
        with disk_full_as_error():
            seen = look_at(settings)
        shown.text("watchdog", settings.engine, seen["page"])
        reasons = [alarm["cause"] for alarm in seen["alarms"]]
        kept = {name: seen[name] for name in ("engine", "verdict", "digest", "announced")}
        return {**kept, "reasons": reasons}
    with disk_full_as_error():
        found = check(settings)
    space, files = workspace_of(settings), [Path(file) for file in found["files"]]
    report = next(file for file in files if file.name == "drift.md")
    shown.text("drift", found["pair"], report.read_text(encoding="utf-8"))
    if found["checks"]:
        shown.table(
            "drift-checks", space, found["checks"], "Each figure against its limit and chance"
        )
    for file in files:
        shown.picture("drift", space, file)
    return {name: found[name] for name in ("pair", "verdict", "reasons", "digest", "announced")}


def post(settings: DriftSettings, report: DriftReport, spool: Path) -> None:
    """Send the event of a drift."""
    resource = {
        "prefect.resource.id": f"draftwell.pair.{report.pair}",
        "prefect.resource.name": report.pair,
        "draftwell.device": settings.device,
    }
    payload = {
        "pair": report.pair,
        "device": settings.device,
        "digest": report.digest,
        "champion": report.baseline,
        "reasons": list(report.reasons),
        "settings": answer_settings(settings, spool, report.digest),
    }
    post_event(resource, payload)


def post_event(resource: dict[str, str], payload: dict[str, Any]) -> None:
    """Send an event to Prefect and wait until the server has it: `emit_event` leaves it to a thread
    that may lose it silently.

    Raises:
        httpx.HTTPError: the server is unavailable, or refuses it.
    """
    event = Event(event=EVENT, resource=Resource(resource), payload=payload)
    with get_client(sync_client=True) as client:
        client.request("POST", "/events", json=[event.model_dump(mode="json")])


def answer_settings(settings: DriftSettings, spool: Path, digest: str) -> dict[str, Any]:
    """The settings of the run that answers a drift; paths are whole, because a worker may start
    elsewhere."""
    given = settings.model_dump(mode="json", exclude_unset=True, exclude={"reference"})
    return {
        **given,
        "engine": settings.engine,
        "source": "drift",
        "pair": pair_anywhere(settings.pair),
        "device": settings.device,
        "collect_prompts": settings.collect_prompts,
        "spool": str(spool.absolute()),
        "drift": digest,
        "out": str(settings.out.absolute()),
    }


@task(name="deploy what the alias names", **ANEW)
def follow_alias(settings: PipelineSettings) -> dict[str, Any]:
    """Let `current` lead to the champion of the alias; returns what was found or done."""
    space = workspace_of(settings)
    done = sync_champion(space, settings.device, settings.out)
    if done.state == "deployed" and done.release and done.bundle:
        assets.bundle_made(space, settings.device, done.release, done.bundle)
    bundle = None if done.bundle is None else str(done.bundle)
    return {"state": done.state, "release": done.release, "bundle": bundle}


@flow(name="sync", **FLOW)
def sync(settings: PipelineSettings) -> dict[str, Any]:
    """Deploy the champion that the alias names, whoever set it, if something else is served.

    It takes no slot, because it measures nothing. It fails, and names the release, where the
    champion has no passed gate: what was asked for in MLflow was not done, and a person has to see.
    """
    return follow_alias(settings)
