"""The stations of the loop as plain functions: what they share, and the last one, `publish`.

collect → train → calibrate → tune → release (`collecting`, `training`, `tuning`, here). Each reads and writes the pair's workspace
and returns what it made; none knows Prefect. `publish` alone talks to the registry.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.workspace import Workspace
from serving.runtime.artifacts.base import digest_of, write_atomically
from serving.runtime.types import DraftwellError

if TYPE_CHECKING:
    from registry.releases import ReleaseVersion
    from serving.runtime.pair import LoadedPair
    from serving.runtime.trace import TraceSet

Bar = Callable[..., None]
PICTURES = {"verifier": ("roc.png", "roc_by_lambda.png", "reliability.png", "verifier.json", "verifier.md"),
            "acceptance_head": ("acceptance_head.png", "acceptance_head.json"), "acceptance_table": ("acceptance_by_confidence.png",),
            "correction_memory": ("rejections.png",), "decoding_config": ("tuning.html", "tuning_*.png")}
"""kind → the files among the reports that are published with it."""


@dataclass(frozen=True)
class Station:
    """What all stations work with."""

    workspace: Workspace
    pair: LoadedPair
    bar: Bar | None = None

    def report(self, name: str, value: Any) -> Path:
        """Write a JSON report into the workspace."""
        path = self.workspace.reports / f"{name}.json"
        write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())
        return path

    def parents(self, *kinds: str) -> dict[str, str]:
        """kind → digest of artifacts in the workspace that something is made from."""
        return {k: digest_of(self.workspace.artifacts / k) for k in kinds if (self.workspace.artifacts / k).is_dir()}


def open_trace(station: Station, folder: Path | None = None) -> TraceSet:
    """The trace set to learn from."""
    from components.collection import is_complete
    from serving.runtime.trace import TraceSet

    traces = TraceSet(folder or station.workspace.traces, fingerprint=station.pair.fingerprint)
    if not traces.shards:
        raise DraftwellError(f"no traces in {traces.folder}: run `draftwell collect --pair {station.workspace.spec.name}` first")
    if not is_complete(traces.folder):
        raise DraftwellError(f"the collection in {traces.folder} is unfinished: run the same `draftwell collect` again, it goes on "
                             "where it stopped")
    return traces


def publish(station: Station, evidence: Mapping[str, Any], *, device: str = "cpu") -> ReleaseVersion:
    """Publish every artifact of the workspace and pin them in a new release, which becomes `candidate`."""
    from registry.pairs import model_records
    from registry.releases import create_release
    from registry.store import Store

    space, store = station.workspace, Store()
    files = space.files()
    folders = {p.name: p for p in sorted(space.artifacts.iterdir())} if space.artifacts.is_dir() else {}
    if "decoding_config" not in folders:
        raise DraftwellError(f"nothing to release: run `draftwell tune --pair {space.spec.name}` first")
    if files.draft is not None and (files.draft / "artifact.json").is_file():
        folders["distilled_draft"] = files.draft
    pins = {kind: store.publish(folder, pair=space.spec.name, plots=pictures_of(space, kind)).version for kind, folder in folders.items()}
    return create_release(store, space.spec.name, device, pins, model_records(space.spec, files), dict(evidence))


def pictures_of(space: Workspace, kind: str) -> list[Path]:
    """The plots and pages in the workspace's reports that belong to an artifact."""
    return sorted(path for pattern in PICTURES.get(kind, ()) for path in space.reports.glob(pattern))


def now() -> str:
    """This moment, ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
