"""What all steps work with: the pair's workspace, its loaded models, and a progress bar."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.workspace import Workspace
from serving.artifacts.base import digest_of
from serving.artifacts.kinds import find_kind
from serving.errors import DraftwellError
from serving.files import write_json

if TYPE_CHECKING:
    from serving.recording.trace import TraceSet
    from serving.runtime.pair import LoadedPair

Bar = Callable[..., None]


@dataclass(frozen=True)
class StepContext:
    """What all steps work with."""

    workspace: Workspace
    pair: LoadedPair
    bar: Bar | None = None

    def report(self, name: str, value: Any) -> Path:
        """Write a JSON report into the workspace."""
        return write_json(self.workspace.reports / f"{name}.json", value)

    def stamp(self, kind: str) -> None:
        """Note in an artifact's pictures, freshly drawn, which one they are of."""
        from components.report.drawing import note_artifact

        for picture in pictures_of(self.workspace, kind):
            if picture.suffix == ".png":
                note_artifact(picture, digest_of(self.workspace.artifacts / kind))

    def parents(self, *kinds: str) -> dict[str, str]:
        """kind → digest of artifacts in the workspace that something is made from."""
        return {k: digest_of(self.workspace.artifacts / k) for k in kinds if (self.workspace.artifacts / k).is_dir()}


def open_trace(step: StepContext, folder: Path | None = None) -> TraceSet:
    """The trace set to learn from."""
    from components.collect.plan import is_complete
    from serving.recording.trace import TraceSet

    traces = TraceSet(folder or step.workspace.traces, fingerprint=step.pair.fingerprint)
    if not traces.shards:
        raise DraftwellError(f"no traces in {traces.folder}: run `draftwell collect --pair "
                             f"{step.workspace.spec.name}` first", code="no_traces")
    if not is_complete(traces.folder):
        raise DraftwellError(f"the collection in {traces.folder} is unfinished: run the same `draftwell collect` again, it resumes "
                             "where it stopped", code="collection_unfinished")
    return traces


def pictures_of(space: Workspace, kind: str) -> list[Path]:
    """The plots and pages in the workspace's reports that belong to an artifact."""
    return sorted(path for pattern in find_kind(kind).pictures for path in space.reports.glob(pattern))


def now() -> str:
    """This moment, ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
