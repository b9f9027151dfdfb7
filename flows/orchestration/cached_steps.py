"""Steps that run once for what they are made of: the result is kept in a file under a key, and
believed while what it made is there.

The file is in the pair's workspace, next to what the step made, so that all workers of a pool see
both; there is one for each device, or two devices on one machine would make each other compute
again. Prefect's own cache would skip a step although somebody has emptied or changed the workspace
since.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.flows.loading import prompts_of
from draftwell.flows.orchestration.learn_tasks import within
from draftwell.flows.settings import BESIDES, PipelineSettings
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.base import ArtifactError, digest_of
from draftwell.serving.files import json_digest, write_json

if TYPE_CHECKING:
    from prefect import Task

TRACES, SAMPLED_TRACES = "traces", "traces_sampled"
"""Names of the trace sets among kinds of artifacts: their folders in the workspace."""
KEPT_SECONDS = 30 * 24 * 3600.0
"""How long the result of a scheduled step is believed: machines change."""


def run_once(
    file: Path,
    key: str,
    step: Callable[[], Any],
    *,
    still_stands: Callable[[Any], bool] = lambda result: True,
    seconds: float | None = None,
) -> Any:
    """The result of a step that is kept in a file; the step runs where there is none for this key.

    Args:
        file: `{"key": …, "result": …}`; anything else, such as a file of an older version, is
            replaced.
        key: digest of all that the step depends on.
        still_stands: whether what a kept result names is still there.
        seconds: age from which a kept result is not believed; None keeps it for ever.
    """
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        fresh = seconds is None or time.time() - file.stat().st_mtime < seconds
        if fresh and kept["key"] == key and still_stands(kept["result"]):
            return kept["result"]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    result = step()
    write_json(file, {"key": key, "result": result})
    return result


def once(
    step: Task[[PipelineSettings], dict[str, Any]],
    settings: PipelineSettings,
    space: Workspace,
    before: Mapping[str, Any],
) -> dict[str, Any]:
    """Run a task whose result is `{"made": kind → digest, …}`, unless it ran on the same inputs and
    what it made then is in the workspace.

    Args:
        before: what the step is made of besides settings, prompts, weights, machine and code;
            digests and small figures.
    """
    file, key = (
        space.device_root / "steps" / f"{step.name}.json",
        key_of(step.name, settings, space, before),
    )
    found: dict[str, Any] = run_once(
        file,
        key,
        lambda: within(settings, step)(settings),
        still_stands=lambda result: standing(space, result["made"]) == result["made"],
        seconds=KEPT_SECONDS,
    )
    return found


def key_of(
    step: str, settings: PipelineSettings, space: Workspace, before: Mapping[str, Any]
) -> str:
    """Digest of all that a step depends on; no path and no name is in it."""
    from draftwell.components.report.provenance import code_digest, device_class
    from draftwell.serving.artifacts.pair_files import fingerprint

    prompts = {
        name: [asdict(prompt) for prompt in rows] for name, rows in prompts_of(settings).items()
    }
    parts = {
        "step": step,
        "settings": settings.model_dump(mode="json", exclude=BESIDES),
        "prompts": prompts,
        "pair": fingerprint(space.files(), space.dtype),
        "machine": device_class(settings.device),
        "code": code_digest(),
        "before": dict(before),
    }
    return f"{step}-{json_digest(parts, default=str)}"


def traces_of(settings: PipelineSettings) -> tuple[str, ...]:
    """The trace sets that the flows of these settings collect and learn from."""
    return (TRACES, SAMPLED_TRACES)[: len(settings.temperatures)]


def standing(space: Workspace, kinds: Iterable[str]) -> dict[str, str]:
    """kind → digest of what is in the workspace now; what is missing or broken is left out."""
    from draftwell.serving.recording.trace import TraceSet
    from draftwell.serving.recording.trace_schema import TraceError

    found = {}
    for kind in kinds:
        try:
            traces = kind in (TRACES, SAMPLED_TRACES)
            found[kind] = (
                TraceSet(space.traces.with_name(kind)).digest()
                if traces
                else digest_of(space.folder(kind))
            )
        except (ArtifactError, TraceError):
            continue
    return found
