"""Who made which release champion: an append-only record, which is also the lock of promotion.

MLflow changes an alias unconditionally, but its database gives every version of a model a number
of its own, which never comes again. So each change of a champion is a version of the registered
model `promotions.<pair>.<device>`, and names the change that its writer saw last. It counts only if
that is still the last one that counts: of two at once the later number is void. The order is that
of the numbers; no clocks are compared.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field, ValidationError

from draftwell.registry.gates import GateRecord
from draftwell.registry.releases import ReleaseVersion
from draftwell.registry.store import Published, Store
from draftwell.registry.strict import Strict
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest

What = Literal["promotion", "rollback", "by hand"]
KIND = "promotions"
CHANGE, DONE, RELEASE_DIGEST = "change", "done", "release_digest"
"""Tags of an entry: a `Change` as JSON, that its alias was set, and the release's digest."""


class Change(Strict):
    """What its writer says of a change of the champion."""

    what: What
    release: int = Field(ge=1, description="the champion from now on")
    after: int = Field(ge=0, description="number of the last change that the writer saw; 0: none")
    by: str = Field(description="who, as their environment says")
    reason: str | None = None
    judged: str | None = Field(None, description="digest of the gate record")
    mark: str = Field(
        default_factory=lambda: secrets.token_hex(8),
        description="its own; an entry that was sent twice has it twice",
    )


@dataclass(frozen=True)
class Entry:
    """A change that counts.

    Args:
        before: the champion that it replaced; None where there was none.
    """

    change: Change
    before: int | None
    kept: Published

    @property
    def number(self) -> int:
        return self.kept.version

    @property
    def done(self) -> bool:
        """Whether its alias was set."""
        return DONE in self.kept.tags

    @property
    def at(self) -> datetime:
        """When, by the registry's clock."""
        return datetime.fromtimestamp(self.kept.created / 1000, UTC)

    @property
    def words(self) -> str:
        """The change in one line."""
        change, instead = self.change, f" instead of {self.before}" if self.before else ""
        why = f": {change.reason}" if change.reason else ""
        return (
            f"{self.at:%Y-%m-%d %H:%M} UTC  release {change.release}{instead}, "
            f"{change.what} {change.by}{why}"
        )


class History(tuple[Entry, ...]):
    """The changes that count, the oldest first."""

    @property
    def champion(self) -> int | None:
        """Number of the release that the last change made champion."""
        return self[-1].change.release if self else None

    def became_champion(self, release: int) -> Entry | None:
        """The last change that made a release champion; None if it never was."""
        return next((entry for entry in reversed(self) if entry.change.release == release), None)

    def was_promoted(self, release: int) -> bool:
        """Whether a promotion or a rollback, which ask for a gate record, made it champion."""
        return any(e.change.release == release and e.change.what != "by hand" for e in self)

    def rolled_back(self, release: int) -> Entry | None:
        """The rollback that took a release back, if no promotion came after it."""
        for entry in reversed(self):
            if entry.change.what == "promotion" and entry.change.release == release:
                return None
            if entry.change.what == "rollback" and entry.before == release:
                return entry
        return None

    def earlier_champions(self) -> Iterator[int]:
        """All that were champion before this one and were not taken back, the last one first."""
        for number in dict.fromkeys(entry.change.release for entry in reversed(self)):
            if number != self.champion and self.rolled_back(number) is None:
                yield number


def history(store: Store, pair: str, device: str) -> History:
    """All changes of a pair's champion on a device.

    A record of releases that were deleted, or renamed, as a whole says nothing of those that have
    their numbers now: a change of a release with another digest does not count.

    Raises:
        DraftwellError: an entry was deleted, or is none of ours (`promotions_damaged`).
    """
    found: list[Entry] = []
    digests = {one.version: one.digest for one in store.versions("release", f"{pair}.{device}")}
    for number, kept in enumerate(store.versions(KIND, f"{pair}.{device}"), start=1):
        try:
            change = Change.model_validate_json(kept.tags.get(CHANGE, ""))
        except ValidationError:
            change = None
        if change is None or kept.version != number:
            raise DraftwellError(
                f"version {number} of {kept.name}, which records who was champion, was deleted or "
                "changed: delete that registered model in MLflow; a new record begins with the "
                "champion that the alias names",
                code="promotions_damaged",
            )
        named = kept.tags.get(RELEASE_DIGEST)
        if named is not None and digests.get(change.release, named) != named:
            continue
        if change.after == (found[-1].number if found else 0):
            found.append(Entry(change, found[-1].change.release if found else None, kept))
    return History(found)


def append(
    store: Store,
    release: ReleaseVersion,
    seen: History,
    what: What,
    reason: str | None = None,
    record: GateRecord | None = None,
) -> Change:
    """Add a change after those that were seen; `history` tells whether it counts."""
    change = Change(
        what=what,
        release=release.version,
        after=seen[-1].number if seen else 0,
        by=f"found by {person()}" if what == "by hand" else f"by {person()}",
        reason=reason,
        judged=json_digest(record.model_dump(mode="json")) if record else None,
    )
    store.append(
        KIND,
        f"{release.pair}.{release.device}",
        release.published,
        {CHANGE: change.model_dump_json(), RELEASE_DIGEST: release.published.digest},
        f"Release {change.release}: {what} {change.by}",
    )
    return change


def person() -> str:
    """Who runs this, as the environment says: MLflow's user, else the system's, and the host."""
    try:
        user = os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
