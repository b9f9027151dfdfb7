"""Publishing: every artifact of the workspace into the registry, pinned in a new release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flows.context import StepContext, pictures_of
from serving.errors import DraftwellError

if TYPE_CHECKING:
    from registry.releases import ReleaseVersion



def run_publish(step: StepContext, evidence: Mapping[str, Any], *, device: str = "cpu") -> ReleaseVersion:
    """Publish every artifact of the workspace and pin them in a new release, which becomes `candidate`; and collect what a lossy one
    would serve, which its traffic is compared with (`reference_traces.keep_served`).

    Args:
        evidence: kept with the release as JSON; MLflow compares the numbers at its top.
    """
    from flows.steps.reference_traces import keep_served
    from registry.pairs import model_records
    from registry.releases import create_release
    from registry.store import Store
    from serving.artifacts.decoding_config import DecodingConfig

    space, store = step.workspace, Store()
    files = space.files()
    # What begins with a dot was left by a run that was killed while it wrote.
    folders = {p.name: p for p in sorted(space.artifacts.glob("[!.]*")) if p.is_dir()}
    if "decoding_config" not in folders:
        raise DraftwellError(f"nothing to release: run `draftwell tune --pair {space.spec.name}` first", code="nothing_to_release")
    if files.draft is not None and (files.draft / "artifact.json").is_file():
        folders["distilled_draft"] = files.draft
    config = DecodingConfig.load(folders["decoding_config"])
    settings = {"strategy": config.strategy, **{f"parameters.{key}": value for key, value in config.parameters.items()}}
    pins = {kind: store.publish(folder, pair=space.spec.name, plots=pictures_of(space, kind)).version for kind, folder in folders.items()}
    release = create_release(store, space.spec.name, device, pins, model_records(space.spec, files), dict(evidence), settings=settings)
    keep_served(step, release, config)
    return release


