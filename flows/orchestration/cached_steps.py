"""Steps that run once for what they are made of: their results are kept under a digest, and believed only while what they made stands.

Prefect's cache alone would skip a step whose key it knows, although somebody has emptied or changed the workspace since. So a kept
result names the digests of what its step made, and a step whose product is not in the workspace any more runs again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from flows.loading import prompts_of
from flows.orchestration.learn_tasks import RESULT, RETRY
from flows.settings import BESIDES, PipelineSettings
from flows.workspace import Workspace
from serving.artifacts.base import ArtifactError, digest_of

if TYPE_CHECKING:
    from prefect import Task

TRACES = "traces"
"""What stands for the trace set among kinds of artifacts."""


def by_key(context: Any, parameters: Mapping[str, Any]) -> str:
    """Prefect's cache key of a step: the digest that it was called with."""
    return str(parameters["key"])


KEYED: dict[str, Any] = {**{name: value for name, value in RETRY.items() if name != "cache_policy"}, **RESULT,
                         "cache_key_fn": by_key, "persist_result": True, "cache_expiration": timedelta(days=30)}
"""Options of a task `(settings, key)` whose result is `{"made": kind → digest, …}`; a month, since machines change."""


def once(step: Task[[PipelineSettings, str], dict[str, Any]], settings: PipelineSettings, space: Workspace,
         before: Mapping[str, Any]) -> dict[str, Any]:
    """Run a step, unless it ran on the same inputs and what it made then stands in the workspace.

    Args:
        before: what the step is made of besides settings, prompts, weights, machine and code; digests and small figures.
    """
    key = key_of(step.name, settings, space, before)
    done = step(settings, key)
    if standing(space, done["made"]) != done["made"]:
        print(f"{step.name}: what an earlier run made is not in the workspace any more, so it runs again")
        done = step.with_options(refresh_cache=True)(settings, key)
    return done


def key_of(step: str, settings: PipelineSettings, space: Workspace, before: Mapping[str, Any]) -> str:
    """Digest of all that a step depends on; no path and no name is in it."""
    from components.report.provenance import device_class, git_commit
    from serving.artifacts.pair_files import fingerprint

    prompts = {name: [asdict(prompt) for prompt in rows] for name, rows in prompts_of(settings).items()}
    parts = {"step": step, "settings": settings.model_dump(mode="json", exclude=BESIDES), "prompts": prompts,
             "pair": fingerprint(space.files(), space.dtype), "machine": device_class(settings.device),
             "code": git_commit() or version("draftwell"), "before": dict(before)}
    return f"{step}-{hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()}"


def standing(space: Workspace, kinds: Iterable[str]) -> dict[str, str]:
    """kind → digest of what is in the workspace now; what is missing or broken is left out."""
    from serving.recording.trace import TraceSet
    from serving.recording.trace_schema import TraceError

    found = {}
    for kind in kinds:
        try:
            found[kind] = TraceSet(space.traces).digest() if kind == TRACES else digest_of(space.artifacts / kind)
        except (ArtifactError, TraceError):
            continue
    return found
