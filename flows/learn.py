"""Prefect tasks and flows of collecting, training, calibrating and tuning; each wraps one plain station.

Tasks hand on paths, digests and small dicts, never tensors.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows import collecting, stations, training, tuning
from flows.context import prompts_of, station_of
from flows.settings import PipelineSettings

RESULT: dict[str, Any] = {"result_serializer": "json"}  # Prefect's default is pickle
# Tasks read and write the workspace: where results are kept, Prefect would skip one that has the same parameters as before.
STATION: dict[str, Any] = {"cache_policy": NO_CACHE, **RESULT}
RETRY: dict[str, Any] = {"retries": 1, "retry_delay_seconds": 5, **STATION}


@task(name="collect traces", **RETRY)
def collect_task(settings: PipelineSettings) -> dict[str, Any]:
    """Collect traces; returns folder and digest."""
    traces = collecting.collect(station_of(settings), prompts_of(settings)["collect"], max_tokens=settings.collect_tokens, fresh=True)
    return {"folder": str(traces.folder), "digest": traces.digest()}


@task(name="train verifier", **RETRY)
def train_task(settings: PipelineSettings) -> dict[str, Any]:
    """Train a SPRINTER verifier; returns its report."""
    station = station_of(settings)
    return training.train(station, stations.open_trace(station))


@task(name="calibrate", **RETRY)
def calibrate_task(settings: PipelineSettings) -> dict[str, Any]:
    """Make acceptance table, correction memory and hardware profile; returns what is in them."""
    station = station_of(settings)
    return training.calibrate(station, stations.open_trace(station), prompts_of(settings)["calibrate"],
                              max_tokens=settings.collect_tokens)


@task(name="tune", **RETRY)
def tune_task(settings: PipelineSettings) -> dict[str, Any]:
    """Choose strategy and parameters; returns the choice and why."""
    station = station_of(settings)
    tuned = tuning.tune(station, stations.open_trace(station), prompts_of(settings)["tune"], max_tokens=settings.tune_tokens,
                        trials=settings.trials, lossless_only=settings.lossless_only, max_quality_loss=settings.max_quality_loss,
                        max_cost_ratio=settings.max_cost_ratio)
    return {"strategy": tuned.strategy, "parameters": tuned.parameters, "reason": tuned.evidence.get("reason", "")}


@flow(name="collect", log_prints=True, validate_parameters=True, **RESULT)
def collect_flow(settings: PipelineSettings) -> dict[str, Any]:
    """Collect traces of a pair."""
    return collect_task(settings)


@flow(name="train", log_prints=True, validate_parameters=True, **RESULT)
def train_flow(settings: PipelineSettings) -> dict[str, Any]:
    """Train a verifier on the collected traces."""
    return train_task(settings)


@flow(name="calibrate", log_prints=True, validate_parameters=True, **RESULT)
def calibrate_flow(settings: PipelineSettings) -> dict[str, Any]:
    """Calibrate on the collected traces."""
    return calibrate_task(settings)


@flow(name="tune", log_prints=True, validate_parameters=True, **RESULT)
def tune_flow(settings: PipelineSettings) -> dict[str, Any]:
    """Tune a pair on the collected traces."""
    return tune_task(settings)
