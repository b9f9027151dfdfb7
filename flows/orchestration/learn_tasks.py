"""Prefect tasks of collecting, training, calibrating and tuning; each wraps one plain step.

Tasks return paths, digests and small dicts, never tensors.
"""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.tasks import exponential_backoff

from components.collect.settings import CollectionSettings
from flows import context
from flows.failures import worth_retrying
from flows.loading import open_from_settings, prompts_of, worker_pool_of
from flows.settings import PipelineSettings
from flows.steps import collect as collect_step
from flows.steps import train as train_step
from flows.steps import tune as tune_step
from flows.workspace import Workspace

RESULT: dict[str, Any] = {"result_serializer": "json"}  # Prefect's default is pickle
# Tasks read and write the workspace: where results are kept, Prefect would skip one that has the same parameters as before.
STATION: dict[str, Any] = {"cache_policy": NO_CACHE, **RESULT}
# 10, 20 and 40 s, each up to half as long again, so that flows that failed together do not come back together: a registry that is
# unavailable for a minute is waited for. What a person must fix is not tried again.
RETRY: dict[str, Any] = {"retries": 3, "retry_delay_seconds": exponential_backoff(10), "retry_jitter_factor": 0.5,
                         "retry_condition_fn": worth_retrying, **STATION}


@task(name="collect traces", **RETRY)
def collect_task(settings: PipelineSettings) -> dict[str, Any]:
    """Collect traces; returns folder and digest."""
    prompts = prompts_of(settings)["collect"]
    wanted = CollectionSettings(max_tokens=settings.collect_tokens)
    load_with = collect_step.loading(Workspace(settings.pair, settings.dtype), prompts, wanted)
    traces = collect_step.run_collect(open_from_settings(settings, **load_with), prompts, wanted, fresh=True,
                                      pool=worker_pool_of(settings))
    return {"folder": str(traces.folder), "digest": traces.digest()}


@task(name="train verifier", **RETRY)
def train_task(settings: PipelineSettings) -> dict[str, Any]:
    """Train a SPRINTER verifier; returns its report."""
    step = open_from_settings(settings)
    return train_step.run_train(step, context.open_trace(step)).to_json()


@task(name="calibrate", **RETRY)
def calibrate_task(settings: PipelineSettings) -> dict[str, Any]:
    """Make acceptance table, correction memory and hardware profile; returns what is in them."""
    step = open_from_settings(settings)
    return train_step.run_calibrate(step, context.open_trace(step), prompts_of(settings)["calibrate"],
                              max_tokens=settings.collect_tokens)


@task(name="tune", **RETRY)
def tune_task(settings: PipelineSettings) -> dict[str, Any]:
    """Choose strategy and parameters; returns the choice and why."""
    return tune_step.tune_as(settings, open_from_settings(settings), prompts_of(settings)["tune"])
