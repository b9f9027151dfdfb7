"""The age limit of what was made of served traffic, as the spool has one: recalibrations, and the
references of releases that no longer serve."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from draftwell.flows.steps.announcement import announced
from draftwell.flows.steps.champion import champion_of, serving_release
from draftwell.flows.steps.reference_traces import (
    RECALIBRATIONS,
    Served,
    kept_reference,
    of_release,
    served_reference,
)
from draftwell.flows.workspace import TURN, Workspace
from draftwell.serving.device import DEVICES
from draftwell.serving.files import file_lock
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceError


def remove_old(space: Workspace, out: Path, days: float) -> list[Path]:
    """Delete recalibrations and references of drift in which nothing has changed for so many days,
    but for those of what serves on any device, of its champions, and of a drift that was announced
    last; returns their folders.

    Args:
        out: folder of bundles, for what `current` serves.
    Raises:
        DraftwellError: the registry does not answer.
    """
    since = time.time() - 86_400 * days
    places = (space.root / RECALIBRATIONS, space.root / "drift" / "references")
    old = [
        folder
        for place in places
        for folder in sorted(place.glob("[!.]*/"))
        if last_change(folder) < since
    ]
    if not old:
        return []
    releases = list(in_use(space, out))
    digests = {one.trace_digest for one in releases} - {None}
    kept = {kept_reference(space, str(digest)) for digest in digests}
    kept |= {served_reference(space, one) for one in releases if one.lossy is not None}
    pending = {found.digest[:12] for device in DEVICES if (found := announced(space, device))}
    removed = []
    for folder in old:
        if folder in kept or folder.name in pending or digest_of(folder / "traces") in digests:
            continue
        with file_lock(folder / TURN, wait=False) as free:
            if free:
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def in_use(space: Workspace, out: Path) -> Iterator[Served]:
    """What serves, and the champions, on every device."""
    for device in DEVICES:
        found = (serving_release(space, device, out), champion_of(space, device))
        numbers = {release.version: release for release in found if release is not None}
        yield from map(of_release, numbers.values())


def digest_of(folder: Path) -> str | None:
    """Digest of a folder's traces; None where it has none that can be read."""
    try:
        return TraceSet(folder).digest()
    except TraceError:
        return None


def last_change(folder: Path) -> float:
    """When anything in a folder was last written, in seconds since 1970."""
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
