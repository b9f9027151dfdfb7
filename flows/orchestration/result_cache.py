"""When Prefect's cache of results may be believed: the key of a task's result is a digest of all
that it is made of, and what the result names must still be in the workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

from prefect import Task
from prefect.context import TaskRunContext

from draftwell.components.report.provenance import code_digest, device_class
from draftwell.flows.loading import prompts_of, workspace_of
from draftwell.flows.orchestration.task_options import RETRY
from draftwell.flows.settings import BESIDES, PipelineSettings
from draftwell.flows.steps.champion import champion_number, champion_of
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.base import ArtifactError, digest_of
from draftwell.serving.artifacts.kinds import READ_BY_STRATEGIES
from draftwell.serving.artifacts.pair_files import draftwell_home, fingerprint
from draftwell.serving.files import json_digest
from draftwell.serving.recording.trace import TraceSet

HEAD = "acceptance_head"
Result = TypeVar("Result")


def result_key(context: TaskRunContext, parameters: dict[str, Any]) -> str | None:
    """Digest of what a task's result depends on; no path and no name is in it. None: an engine that
    restarts keeps its own measurements."""
    settings: PipelineSettings = parameters["settings"]
    if settings.restarts:
        return None
    space, step = workspace_of(settings), context.task.name
    parts: dict[str, Any] = {
        "settings": settings.model_dump(mode="json", exclude=BESIDES),
        "prompts": {
            name: [asdict(prompt) for prompt in rows] for name, rows in prompts_of(settings).items()
        },
        "pair": fingerprint(space.files(), space.dtype),
        "machine": device_class(settings.device),
        "code": code_digest(),
        "traces": [TraceSet(space.traces_at(each)).digest() for each in settings.temperatures],
    }
    if step == "train":
        parts["head"] = serves_head(space)
    if step == "tune":
        parts["artifacts"] = standing(space, READ_BY_STRATEGIES)
        parts["champion"] = champion_number(space, settings.device)
    return f"{step}-{json_digest(parts, default=str)}"


CACHED: dict[str, Any] = {
    **RETRY,
    "cache_key_fn": result_key,
    "cache_expiration": timedelta(days=30),  # machines change
    "persist_result": True,
}


def timed(
    settings: PipelineSettings, step: Callable[..., Result], **options: Any
) -> Callable[..., Result]:
    """A task that computes, with the time limit of the settings; its result is kept in the home."""
    assert isinstance(step, Task)
    return step.with_options(
        timeout_seconds=3600 * settings.step_hours,
        result_storage=draftwell_home() / "results",
        **options,
    )


def believed(
    settings: PipelineSettings, step: Callable[..., dict[str, Any]], *more: Any
) -> dict[str, Any]:
    """The result of a task that Prefect may have cached, unless what it made is gone or another."""
    found = timed(settings, step, refresh_cache=settings.fresh)(settings, *more)
    if standing(workspace_of(settings), found["made"]) == found["made"]:
        return found
    return timed(settings, step, refresh_cache=True)(settings, *more)


def standing(space: Workspace, kinds: Iterable[str]) -> dict[str, str]:
    """kind → digest of what is in the workspace now; what is missing or broken is left out."""
    found = {}
    for kind in kinds:
        try:
            found[kind] = digest_of(space.folder(kind))
        except ArtifactError:
            continue
    return found


def serves_head(space: Workspace) -> bool:
    """Whether the champion has an acceptance head, which is then trained again."""
    champion = champion_of(space, space.device)
    return champion is not None and HEAD in champion.pins
