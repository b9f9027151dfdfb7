"""Prefect tasks and flow of releasing: publish, gate, promote, deploy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, task

from flows import stations, tuning
from flows.context import prompts_of, station_of
from flows.gating import gate_release
from flows.learn import RESULT, RETRY, STATION
from flows.settings import PipelineSettings


@task(name="publish", **RETRY)
def publish_task(settings: PipelineSettings) -> int:
    """Publish the workspace's artifacts and pin them in a release; returns its number."""
    return stations.publish(station_of(settings), settings.model_dump(mode="json"), device=settings.device).version


@task(name="gate", **RETRY)
def gate_task(settings: PipelineSettings, release: int, full: bool = True) -> dict[str, Any]:
    """Gate a release, beside all strategies if `full`; returns report, checks and whether it passed."""
    prompts = prompts_of(settings)["bench"]
    result = gate_release(station_of(settings), prompts if full else prompts[:2], alias=release, device=settings.device,
                          max_tokens=settings.bench_tokens, all_strategies=full)
    return {key: result[key] for key in ("report", "checks", "passed")}


@task(name="promote and deploy", **RETRY)
def deploy_task(settings: PipelineSettings, release: int) -> str:
    """Make a release that passed the champion, and build its bundle; returns the bundle's folder."""
    from registry.bundles import build_bundle
    from registry.releases import promote
    from registry.store import Store

    station, store = station_of(settings), Store()
    promote(store, station.workspace.spec.name, settings.device, release)
    return str(build_bundle(store, station.workspace.spec, station.workspace.files(), device=settings.device, out=Path("dist")))


@task(name="is there a champion", **STATION)
def has_champion_task(settings: PipelineSettings) -> bool:
    """Whether the pair has a champion on the device."""
    from registry.store import Store

    return "champion" in Store().get_aliases("release", f"{station_of(settings).workspace.spec.name}.{settings.device}")


@task(name="fall back to plain decoding", **STATION)
def plain_choice_task(settings: PipelineSettings, reason: str) -> dict[str, Any]:
    """Put plain decoding into the workspace as the choice; returns it."""
    return tuning.choose_plain(station_of(settings), reason)


@flow(name="release", log_prints=True, validate_parameters=True, **RESULT)
def release_flow(settings: PipelineSettings) -> dict[str, Any]:
    """Publish what the workspace holds, gate it, and deploy it if it passes."""
    release = publish_task(settings)
    gated = gate_task(settings, release)
    return {**gated, "release": release, "bundle": deploy_task(settings, release) if gated["passed"] else None}
