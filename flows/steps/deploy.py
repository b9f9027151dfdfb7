"""Deployment: from a release that passed its gate to a bundle that `current` points to.

Promotion is automatic or a person's (`promote` of the settings, else of the pair's YAML file).
Whoever moves the alias, `sync_champion` deploys what it names.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from draftwell.flows.progress import announce
from draftwell.flows.steps.champion import champion_number, current_manifest
from draftwell.flows.workspace import Workspace
from draftwell.registry.bundles.build import build_bundle, relink
from draftwell.registry.bundles.judged import deviation
from draftwell.registry.promotion import adopt, deployment_objection, promote, withdrawal
from draftwell.registry.releases import find_release, is_champion, tell_refused
from draftwell.registry.store import Store
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.registry.releases import ReleaseVersion


def promote_and_deploy(
    space: Workspace, device: str, release: int, out: Path, promotion: str | None = None
) -> Path | None:
    """Make a release that passed its gate the champion, and build its bundle under `out`.

    Args:
        promotion: auto or manual; None takes the pair's own.
    Returns:
        the bundle's folder; None where a person promotes: the release waits as `challenger`, and a
        line says how.
    """
    if (promotion or space.spec.promote) == "manual":
        announce(
            f"release.{space.spec.name}.{device} version {release} passed its gate and "
            "waits as challenger, because promotion is "
            f"manual: `draftwell release promote --pair {space.name} --set device={device} "
            f"--release "
            f"{release}`, or set the alias champion on it "
            f"in MLflow; then `draftwell release sync --pair {space.name} --set "
            f"device={device}`, or "
            "the hourly flow, deploys it"
        )
        return None

    store = Store()
    promoted = promote(store, space.spec.name, device, release)
    bundle = linked(store, space, promoted, out)
    # whoever moved the alias meanwhile may have deployed that before this bundle was linked
    if not is_champion(store, promoted):
        deploy_champion(space, device, out)
    return bundle


def linked(store: Store, space: Workspace, release: ReleaseVersion, out: Path) -> Path:
    """The bundle of a release, which `current` leads to from now on; built where it is missing,
    with a line where it is not the one that the gate judged."""
    bundle = relink(store, release, out) or build_bundle(
        store,
        space.spec,
        space.files(),
        alias=str(release.version),
        device=release.device,
        out=out,
    )
    if line := deviation(bundle, release):
        announce(line)
    return bundle


def deploy_champion(space: Workspace, device: str, out: Path) -> Path | None:
    """Point `current` at the champion's bundle, which is built where it is missing: a promotion may
    have been killed before it was.

    Returns:
        the bundle's folder; None for a champion that no gate passed or that was rolled back, which
        a person chose.
    """

    store = Store()
    champion = find_release(store, space.spec.name, device, "champion")
    if why := deployment_objection(store, champion) or withdrawal(store, champion):
        announce(f"{champion.name}, the champion, is not deployed: {why}")
        return None
    return linked(store, space, champion, out)


@dataclass(frozen=True)
class Synced:
    """What `sync_champion` found or did.

    Args:
        state: deployed, or unchanged: `current` leads to the champion already, or there is no
            champion.
        release: the champion's number; None without one.
        bundle: what `current` leads to now; None without a champion.
    """

    state: Literal["deployed", "unchanged"]
    release: int | None = None
    bundle: Path | None = None


def sync_champion(space: Workspace, device: str, out: Path, *, dry_run: bool = False) -> Synced:
    """Let `current` lead to the release that the alias `champion` names, whoever set it; a server
    that watches `current` switches.

    It may run at any time and any number of times. A champion whose bundle stands is linked,
    another is built. With `dry_run` it is only said what would be done.

    Raises:
        DraftwellError: the champion has no passed gate record, or was rolled back, or `current` is
            of another device: nothing was changed.
    """

    name, served = space.spec.name, current_manifest(space, out)
    if (number := champion_number(space, device)) is None:
        announce(f"release.{name}.{device} has no champion: nothing to deploy")
        return Synced("unchanged")
    store = Store()
    champion, current = find_release(store, name, device, number), out / name / "current"
    if served is not None and served.device != device:
        raise DraftwellError(
            f"{current} serves {name} on {served.device}, not {device}: give each device a "
            "folder with --set bundles=FOLDER (in "
            f"prefect.yaml `out:`), or replace it with `draftwell deploy --device {device}`",
            code="current_of_another_device",
        )
    if served is not None and served.release_digest == champion.published.digest:
        announce(f"{champion.name} is the champion, and `current` leads to it: nothing to do")
        return Synced("unchanged", number, current.resolve())
    if why := deployment_objection(store, champion) or withdrawal(store, champion):
        if not dry_run:
            # told each time, with the same id while it is the same refusal
            tell_refused(champion, why, mark=f"{champion.name} {champion.published.digest} {why}")
        stays = f"release {served.release_version} stays" if served else "nothing is served"
        raise DraftwellError(
            f"the alias champion names {champion.name}, which is not deployed, {why}; "
            f"{stays}: run `draftwell gate --pair "
            f"{name} --device {device} --release {number}`, or set the alias on a release "
            "that passed",
            code="champion_not_deployable",
        )
    if dry_run:
        announce(f"{champion.name} would be deployed")
        return Synced("unchanged", number)
    bundle = linked(store, space, champion, out)
    # it serves already; a registry that only lets us read keeps its aliases
    with contextlib.suppress(DraftwellError):
        adopt(store, name, device)
    announce(f"{champion.name} is deployed: {current} leads to {bundle.name}")
    return Synced("deployed", number, bundle)
