"""What a run makes, as assets of Prefect: traces → artifacts → release → verdict → bundle.

An asset is recorded by the task that made it, once it has: what a release pins, and whether a
bundle was built, is not known before. Prefect sends its event when the task is completed; the
result of a task that was kept from an earlier run is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prefect.assets import Asset
from prefect.assets.core import AssetProperties
from prefect.context import AssetContext

from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.kinds import find_kind

TRACES = "traces"


def artifact_key(space: Workspace, kind: str) -> str:
    """The asset of a workspace's traces, or of an artifact of a kind: `draftwell://pair/dtype/…`,
    with the device before the kind where each device has its own."""
    of_device = kind != TRACES and find_kind(kind).per_device
    device = f"{space.device}/" if of_device else ""
    return f"draftwell://{space.spec.name}/{space.dtype}/{device}{kind}"


def device_key(space: Workspace, device: str, what: str) -> str:
    """The asset of what a pair has once for each device: its release, verdict or bundle."""
    return f"draftwell://{space.spec.name}/{device}/{what}"


def made(key: str, *, of: Iterable[str] = (), url: str | None = None, **metadata: Any) -> None:
    """Record that the task which runs now has made an asset; outside of a task nothing happens.

    Args:
        of: keys of the assets that it was made from.
        url: where a person sees it.
        metadata: values of JSON.
    """
    context = AssetContext.get()
    if context is None:
        return
    properties = None if url is None else AssetProperties(url=url)
    context.downstream_assets.add(Asset(key=key, properties=properties))
    context.direct_asset_dependencies.update(Asset(key=one) for one in of)
    context.add_asset_metadata(key, metadata)


def artifacts_made(space: Workspace, digests: Mapping[str, str], of: Iterable[str]) -> None:
    """Record artifacts of the workspace.

    Args:
        digests: kind → digest.
        of: kinds that they were made from.
    """
    keys = [artifact_key(space, kind) for kind in of]
    for kind, digest in digests.items():
        made(artifact_key(space, kind), of=keys, digest=digest)


def bundle_made(space: Workspace, device: str, release: int, bundle: Path) -> None:
    """Record the bundle of a release that `current` leads to now."""
    made(
        device_key(space, device, "bundle"),
        of=[device_key(space, device, what) for what in ("release", "verdict")],
        release=release,
        bundle=bundle.name,
    )
