"""The release that serves a pair on a device now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.workspace import Workspace

if TYPE_CHECKING:
    from registry.releases import ReleaseVersion


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
