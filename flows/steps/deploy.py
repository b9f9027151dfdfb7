"""Deployment: from a release that passed its gate to a bundle that `current` points to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flows.progress import announce
from flows.workspace import Workspace

if TYPE_CHECKING:
    from registry.releases import ReleaseVersion


def promote_and_deploy(space: Workspace, device: str, release: int, out: Path) -> Path:
    """Make a release that passed its gate the champion, and build its bundle under `out`; returns the bundle's folder."""
    from registry.bundles.build import build_bundle
    from registry.promotion import promote
    from registry.store import Store

    store = Store()
    promoted = promote(store, space.spec.name, device, release)
    return announced(build_bundle(store, space.spec, space.files(), alias=str(release), device=device, out=out), promoted)


def announced(bundle: Path, release: ReleaseVersion) -> Path:
    """The bundle, after a line where it is not the one that the gate judged."""
    from registry.bundles.judged import deviation

    if line := deviation(bundle, release):
        announce(line)
    return bundle


def deploy_champion(space: Workspace, device: str, out: Path) -> Path | None:
    """Point `current` at the champion's bundle, which is built where it is missing: a promotion may have been killed before it was.

    Returns:
        the bundle's folder; None for a champion that no gate passed or that was rolled back, which a person chose.
    """
    from registry.bundles.build import build_bundle, relink
    from registry.promotion import withdrawal
    from registry.releases import find_release, gate_record, objection
    from registry.store import Store

    store = Store()
    champion = find_release(store, space.spec.name, device, "champion")
    if why := objection(champion, gate_record(champion)) or withdrawal(champion):
        announce(f"{champion.name}, the champion, is not deployed: {why}")
        return None
    bundle = relink(store, champion, out) or build_bundle(store, space.spec, space.files(), device=device, out=out)
    return announced(bundle, champion)
