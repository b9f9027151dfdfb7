"""A number as the online state of a server, kept in a folder."""

from __future__ import annotations

from pathlib import Path

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.server.model.snapshots import Snapshots
from tests.support.server.pools import SNAPSHOT_ORIGIN, pool


def save_state(root: Path, number: int) -> None:
    """A server that starts, learns as many tokens as the number says in all, and ends."""
    it, snapshots = pool("spide"), Snapshots(root / "state")
    snapshots.keep(it, SNAPSHOT_ORIGIN)
    table = it.get().artifact(AcceptanceTable)
    while sum(table.total) < number:
        table.update(0.5, kept=True)
    snapshots.close()


def resumed_state(root: Path) -> int | None:
    """How many tokens a server that starts now knows of."""
    it, snapshots = pool("spide"), Snapshots(root / "state")
    snapshots.keep(it, SNAPSHOT_ORIGIN)
    snapshots.close()
    return int(sum(it.get("spide", None).artifact(AcceptanceTable).total)) or None
