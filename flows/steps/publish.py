"""The stations of the loop as plain functions: what they share, and the last one, `run_publish`.

collect → train → calibrate → tune → release (`collecting`, `training`, `tuning`, here). Each reads and writes the pair's workspace
and returns what it made; none knows Prefect. `run_publish` alone talks to the registry.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.progress import announce
from flows.workspace import Workspace
from serving.artifacts.base import digest_of
from serving.errors import DraftwellError
from serving.files import write_atomically

if TYPE_CHECKING:
    from registry.releases import ReleaseVersion
    from serving.recording.trace import TraceSet
    from serving.runtime.pair import LoadedPair

Bar = Callable[..., None]
PICTURES = {"verifier": ("roc.png", "roc_by_lambda.png", "reliability.png", "verifier.json", "verifier.md"),
            "acceptance_head": ("acceptance_head.png", "acceptance_head.json"), "acceptance_table": ("acceptance_by_confidence.png",),
            "correction_memory": ("rejections.png",), "decoding_config": ("tuning.html", "tuning_*.png")}
"""kind → the files among the reports that are published with it."""


@dataclass(frozen=True)
class StepContext:
    """What all stations work with."""

    workspace: Workspace
    pair: LoadedPair
    bar: Bar | None = None

    def report(self, name: str, value: Any) -> Path:
        """Write a JSON report into the workspace."""
        path = self.workspace.reports / f"{name}.json"
        write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())
        return path

    def stamp(self, kind: str) -> None:
        """Note in an artifact's pictures, freshly drawn, which one they are of."""
        from components.report.stamps import stamp

        for picture in pictures_of(self.workspace, kind):
            if picture.suffix == ".png":
                stamp(picture, digest_of(self.workspace.artifacts / kind))

    def parents(self, *kinds: str) -> dict[str, str]:
        """kind → digest of artifacts in the workspace that something is made from."""
        return {k: digest_of(self.workspace.artifacts / k) for k in kinds if (self.workspace.artifacts / k).is_dir()}


def open_trace(station: StepContext, folder: Path | None = None) -> TraceSet:
    """The trace set to learn from."""
    from components.collect.collect import is_complete
    from serving.recording.trace import TraceSet

    traces = TraceSet(folder or station.workspace.traces, fingerprint=station.pair.fingerprint)
    if not traces.shards:
        raise DraftwellError(f"no traces in {traces.folder}: run `draftwell collect --pair {station.workspace.spec.name}` first")
    if not is_complete(traces.folder):
        raise DraftwellError(f"the collection in {traces.folder} is unfinished: run the same `draftwell collect` again, it goes on "
                             "where it stopped")
    return traces


def run_publish(station: StepContext, evidence: Mapping[str, Any], *, device: str = "cpu") -> ReleaseVersion:
    """Publish every artifact of the workspace and pin them in a new release, which becomes `candidate`; and collect what a lossy one
    would serve, which its traffic is compared with (`references.keep_served`).

    Args:
        evidence: kept with the release as JSON; MLflow compares the numbers at its top.
    """
    from flows.steps.reference_traces import keep_served
    from registry.pairs import model_records
    from registry.releases import create_release
    from registry.store import Store
    from serving.artifacts.decoding_config import DecodingConfig

    space, store = station.workspace, Store()
    files = space.files()
    # What begins with a dot was left by a run that was killed while it wrote.
    folders = {p.name: p for p in sorted(space.artifacts.glob("[!.]*")) if p.is_dir()}
    if "decoding_config" not in folders:
        raise DraftwellError(f"nothing to release: run `draftwell tune --pair {space.spec.name}` first")
    if files.draft is not None and (files.draft / "artifact.json").is_file():
        folders["distilled_draft"] = files.draft
    config = DecodingConfig.load(folders["decoding_config"])
    settings = {"strategy": config.strategy, **{f"parameters.{key}": value for key, value in config.parameters.items()}}
    pins = {kind: store.publish(folder, pair=space.spec.name, plots=pictures_of(space, kind)).version for kind, folder in folders.items()}
    release = create_release(store, space.spec.name, device, pins, model_records(space.spec, files), dict(evidence), settings=settings)
    keep_served(station, release, config)
    return release


def promote_and_deploy(space: Workspace, device: str, release: int, out: Path) -> Path:
    """Make a release that passed its gate the champion, and build its bundle under `out`; returns the bundle's folder."""
    from registry.bundles.build import build_bundle
    from registry.releases import promote
    from registry.store import Store

    store = Store()
    promote(store, space.spec.name, device, release)
    return build_bundle(store, space.spec, space.files(), alias=str(release), device=device, out=out)


def deploy_champion(space: Workspace, device: str, out: Path) -> Path | None:
    """Let `current` lead to the champion's bundle, built where it is not there: a promotion may have been cut off before it was.

    Returns:
        the bundle's folder; None for a champion that no gate passed or that was rolled back, which a person put there.
    """
    from registry.bundles.build import build_bundle, relink
    from registry.releases import find_release, gate_record, objection, withdrawal
    from registry.store import Store

    store = Store()
    champion = find_release(store, space.spec.name, device, "champion")
    if why := objection(champion, gate_record(champion)) or withdrawal(champion):
        announce(f"{champion.name}, the champion, is not deployed: {why}")
        return None
    return relink(store, champion, out) or build_bundle(store, space.spec, space.files(), device=device, out=out)


def champion_number(space: Workspace, device: str) -> int | None:
    """The release that serves the pair on a device; None where none does, or where there is no registry, which is not made for this
    question."""
    from registry.connection import registry_exists

    if not registry_exists():
        return None
    from registry.store import Store

    return Store().get_aliases("release", f"{space.spec.name}.{device}").get("champion")


def champion_of(space: Workspace, device: str) -> ReleaseVersion | None:
    """The same release, read; None as for `champion_number`."""
    from registry.releases import find_release
    from registry.store import Store

    number = champion_number(space, device)
    return None if number is None else find_release(Store(), space.spec.name, device, number)


def pictures_of(space: Workspace, kind: str) -> list[Path]:
    """The plots and pages in the workspace's reports that belong to an artifact."""
    return sorted(path for pattern in PICTURES.get(kind, ()) for path in space.reports.glob(pattern))


def now() -> str:
    """This moment, ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
