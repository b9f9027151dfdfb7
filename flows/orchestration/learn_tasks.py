"""Prefect tasks of collecting, training, calibrating and tuning; each wraps one plain step.

Tasks return paths, digests and small dicts, never tensors. Every flow and task has a time limit:
one that hangs fails, and gives its slots back. Where the process is gone too, an automation of the
server ends the run (`automations`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.tasks import exponential_backoff

from draftwell.flows import context
from draftwell.flows.failures import worth_retrying
from draftwell.flows.loading import open_from_settings, prompts_of
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps import collect as collect_step
from draftwell.flows.steps import train as train_step
from draftwell.flows.steps import tune as tune_step
from draftwell.flows.workspace import Workspace

Result = TypeVar("Result")

QUICK = 3600.0
"""Seconds that a task may take that measures nothing: a question to the registry, a bundle."""
LONGEST = 72 * 3600.0
"""Seconds that a flow may take, in which it waits for earlier flows and for a slot: twice
`concurrency.PATIENCE`, and a day of work. The time of its tasks is not counted, because each has
its own limit (Prefect suspends the outer alarm)."""
RESULT: dict[str, Any] = {"result_serializer": "json"}  # Prefect's default is pickle
FLOW: dict[str, Any] = {
    **RESULT,
    "log_prints": True,
    "validate_parameters": True,
    "timeout_seconds": LONGEST,
}
# Tasks read and write the workspace: where results are kept, Prefect would skip one that has the
# same parameters as before.
TASK: dict[str, Any] = {"cache_policy": NO_CACHE, "timeout_seconds": QUICK, **RESULT}
# 10, 20 and 40 s, each up to half as long again, so that flows that failed together do not come
# back together: a registry that is unavailable for a minute is waited for. What a person must fix
# is not tried again.
RETRY: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(10),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": worth_retrying,
    **TASK,
}


def within(settings: PipelineSettings, step: Callable[..., Result]) -> Callable[..., Result]:
    """A task that computes, with the time limit of the settings."""
    return (
        step.with_options(timeout_seconds=3600 * settings.step_hours)
        if isinstance(step, Task)
        else step
    )


@task(name="collect traces", **RETRY)
def collect_task(settings: PipelineSettings) -> dict[str, str]:
    """Collect traces of each class of temperatures; returns the name of their folder → digest."""
    prompts = prompts_of(settings)["collect"]
    load_with = collect_step.loading(
        Workspace(settings.pair, settings.dtype), prompts, collect_step.collection_at(settings, 0.0)
    )
    found = collect_step.collect_classes(
        open_from_settings(settings, **load_with), prompts, settings
    )
    return {name: traces.digest() for name, traces in found.items()}


@task(name="train verifier", **RETRY)
def train_task(settings: PipelineSettings) -> dict[str, Any]:
    """Train a SPRINTER verifier; returns its report."""
    step = open_from_settings(settings)
    return train_step.run_train(step, context.open_trace(step)).to_json()


@task(name="calibrate", **RETRY)
def calibrate_task(settings: PipelineSettings) -> dict[str, Any]:
    """Make acceptance table (its counts of sampled texts too), correction memory and hardware
    profile; returns what is in them."""
    return train_step.calibrate_as(
        settings, open_from_settings(settings), prompts_of(settings)["calibrate"]
    )


@task(name="tune", **RETRY)
def tune_task(settings: PipelineSettings) -> dict[str, Any]:
    """Choose strategy and parameters for each class of temperatures; returns the choices and
    why."""
    return tune_step.tune_as(settings, open_from_settings(settings), prompts_of(settings)["tune"])
