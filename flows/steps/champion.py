"""The release that is to serve a pair on a device, and the one that does.

The *champion* is what an alias of the registry names. What *serves* is the bundle that
`<out>/<pair>/current` leads to: the two differ from the moment a person moves the alias until it is
deployed.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

from draftwell.flows.workspace import Workspace
from draftwell.registry.connection import registry_exists
from draftwell.registry.releases import (
    ReleaseVersion,
    find_release,
    pinned_version,
    suppress_gone,
)
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.kinds import find_kind
from draftwell.serving.bundle.manifest import BundleError, Manifest, read_bundle_manifest


def champion_number(space: Workspace, device: str) -> int | None:
    """The release that an alias names for the pair on a device; None where none does, or where
    there is no registry, which is not made for this question."""
    if not registry_exists():
        return None
    return Store().get_aliases("release", f"{space.spec.name}.{device}").get("champion")


def champion_of(space: Workspace, device: str) -> ReleaseVersion | None:
    """The same release, read; None as for `champion_number`."""
    number = champion_number(space, device)
    return None if number is None else find_release(Store(), space.spec.name, device, number)


def current_manifest(space: Workspace, out: Path) -> Manifest | None:
    """The manifest of the bundle that `current` leads to; None where there is no link, or no bundle
    that can be read behind it."""
    try:
        return read_bundle_manifest((out / space.spec.name / "current").resolve())
    except (BundleError, OSError):
        return None


def serving_release(space: Workspace, device: str, out: Path) -> ReleaseVersion | None:
    """The release behind `current`, where that is a bundle for the device and the registry knows
    it; else the champion."""
    served = current_manifest(space, out)
    if served is not None and served.device == device and registry_exists():
        store = Store()
        known = [
            version.version
            for version in store.versions("release", f"{space.spec.name}.{device}")
            if version.digest == served.release_digest
        ]
        if known:
            return find_release(store, space.spec.name, device, known[-1])
    return champion_of(space, device)


def artifacts_of(
    store: Store, release: ReleaseVersion, fingerprint: str, *, partly: bool = False
) -> dict[str, Artifact]:
    """kind → artifact of everything that a release pins, except the draft, which the loaded pair
    has.

    The pair's fingerprint covers the draft's weights, so a release with another draft is refused
    with its artifacts.

    Args:
        partly: leave out what was deleted since.
    """
    found: dict[str, Artifact] = {}
    with tempfile.TemporaryDirectory() as place:
        for kind in release.pins:
            if kind == "distilled_draft":
                continue
            with suppress_gone() if partly else nullcontext():
                pinned = pinned_version(store, release, kind)
                folder = store.download(pinned, Path(place) / kind)
                found[kind] = find_kind(kind).load_class().load(folder, fingerprint=fingerprint)
    return found
