"""Announcing drift once: which drift was announced last, for which champion."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.components.drift.schema import STEADY, DriftReport
from draftwell.flows.workspace import Workspace
from draftwell.serving.files import file_lock, write_json


class Announced(BaseModel):
    """The drift that was announced last."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    champion: str = Field(description="what served the traffic")
    digest: str = Field(description="of the report")
    spool: Path
    at: datetime.datetime


def announcement(space: Workspace, device: str) -> Path:
    """The file that remembers an announcement."""
    return space.root / "drift" / f"announced-{device}.json"


def announced(space: Workspace, device: str) -> Announced | None:
    """The drift on a device that was announced last; None where there is none, or nothing that can
    be read."""
    try:
        return Announced.model_validate_json(
            announcement(space, device).read_text(encoding="utf-8")
        )
    except (OSError, ValidationError):
        return None


def forget_announced(space: Workspace, device: str, digest: str | None) -> None:
    """Forget a drift that was answered, so that no later run takes its prompts again."""
    found = announced(space, device)
    if found is not None and found.digest == digest:
        announcement(space, device).unlink(missing_ok=True)


def announce_once(
    space: Workspace,
    device: str,
    report: DriftReport,
    spool: Path,
    send: Callable[[], bool],
    now: datetime.datetime | None = None,
) -> bool:
    """Announce a drift, unless it was announced for the same champion within `repeat_after_hours`.

    A drift whose traffic went back to what it was is over.

    Args:
        send: says whether it could be sent; only then it is remembered. Killed in between, it is
            sent twice, never lost.
    Returns:
        whether it was sent now.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    with file_lock(space.root / "drift" / ".lock", wait=False) as free:
        if not free:
            return False  # another check of this pair is just doing it
        if report.verdict == STEADY:
            announcement(space, device).unlink(missing_ok=True)
        if not report.drifted:
            return False
        before = announced(space, device)
        patience = datetime.timedelta(hours=report.limits.repeat_after_hours)
        if before is not None and before.champion == report.baseline and now - before.at < patience:
            return False
        if not send():
            return False
        record = Announced(
            champion=report.baseline, digest=report.digest, spool=spool.absolute(), at=now
        )
        write_json(announcement(space, device), record.model_dump(mode="json"))
        return True
