"""Which release serves: promotion to champion, and rollback.

Promotion is one change of one alias, the release's. The aliases of what it pins follow for people
to see; a process that is killed between the two leaves a complete promotion, and the next
promotion, rollback or deployment moves the others.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from draftwell.registry.gates import GateRecord
from draftwell.registry.releases import (
    ReleaseVersion,
    device_options,
    find_release,
    follow_alias,
    gate_record,
    is_champion,
    move_alias,
    objection,
    record_gate,
)
from draftwell.registry.store import Store
from draftwell.registry.strict import Strict
from draftwell.serving.errors import DraftwellError

CHAMPION_SINCE = "champion_since"
"""Tag: when a release last became champion, ISO 8601; a rollback goes by it."""
ROLLED_BACK = "rolled_back"
"""Tag: a `Withdrawal` as JSON, on a champion that was rolled back."""


class Withdrawal(Strict):
    """Why a champion was rolled back."""

    reason: str = Field(min_length=1)
    to: int = Field(ge=1, description="release that became champion instead")
    at: str = Field(description="when, ISO 8601")


def withdrawal(release: ReleaseVersion) -> str | None:
    """Why and when a release was rolled back, or None."""
    text = release.published.tags.get(ROLLED_BACK)
    if not text:
        return None
    try:
        note = Withdrawal.model_validate_json(text)
    except ValidationError:
        return "it was rolled back"
    return f"it was rolled back on {note.at[:10]} ({note.reason})"


def promote(
    store: Store,
    pair: str,
    device: str,
    version: int | str,
    record: GateRecord | None = None,
    *,
    reason: str | None = None,
) -> ReleaseVersion:
    """Make a release whose gate passed the champion.

    Args:
        record: the verdict; None takes the one that is kept with the release.
        reason: kept with the release; required for one that was rolled back, and for one whose gate
            compared it with another champion than today's.
    Raises:
        DraftwellError: there is no passed verdict that names exactly these versions and today's
            champion, or it was rolled back; nothing was changed.
    """
    release = find_release(store, pair, device, version)
    judged = record or gate_record(release)
    if why := objection(release, judged):
        raise DraftwellError(
            f"{release.name} is not promoted, {why}: run `draftwell gate --pair {pair} "
            f"{device_options(device)} --release "
            f"{release.version}`",
            code="not_gated",
        )
    if (why := outdated(store, release, judged)) and not reason:
        raise DraftwellError(
            f"{release.name} is not promoted, {why}: run `draftwell gate --pair {pair} "
            f"{device_options(device)} --release "
            f"{release.version}`, or give a --reason to promote it all the same",
            code="gated_against_another_champion",
        )
    if (why := withdrawal(release)) and not reason:
        raise DraftwellError(
            f"{release.name} is not promoted, {why}: publish another release, or promote "
            "this one again with "
            f"a reason: `draftwell promote --pair {pair} {device_options(device)} --release "
            f"{release.version} --reason …`",
            code="was_rolled_back",
        )
    if record is not None:
        record_gate(store, record)
    if reason:
        _keep_note(store, release, "promotions", {"reason": reason})
        store.set_tag(release.published, ROLLED_BACK, "")
    _crown(store, release)
    return release


def outdated(store: Store, release: ReleaseVersion, record: GateRecord | None) -> str | None:
    """What is wrong with a verdict that compares the release with another champion than today's, or
    None.

    The champion itself may be promoted again: that finishes a promotion that was cut off.
    """
    champion = store.get_aliases("release", f"{release.pair}.{release.device}").get("champion")
    beside = record.baseline_version if record else None
    if champion is None or champion in (release.version, beside):
        return None
    return (
        f"its gate compared it with {f'version {beside}' if beside else 'no champion'}, and "
        f"version {champion} is the champion now"
    )


def rollback(
    store: Store, pair: str, device: str, reason: str, to: int | None = None
) -> tuple[ReleaseVersion, ReleaseVersion]:
    """Make the previous champion the champion again.

    The release that is rolled back keeps the reason; it is not deployed, nor promoted again without
    another reason. A rollback that was killed is finished when it is run again, and rolls nothing
    else back.

    Args:
        to: number of the release to make champion; None takes the previous champion, leaving out
            all that were rolled back.

    Returns:
        the release that was rolled back, and the champion now.
    Raises:
        DraftwellError: no reason, no champion, none before it, or no passed gate record of that;
            nothing was changed.
    """
    if not reason.strip():
        raise DraftwellError(
            "a rollback needs a reason, which is kept with the release: give one with --reason",
            code="no_reason",
        )
    bad = find_release(store, pair, device, "champion")
    if (cut_off := _cut_off_rollback(store, bad)) is not None and to in (None, bad.version):
        _crown(store, bad)
        return cut_off, bad
    good = find_release(store, pair, device, to if to is not None else _champion_before(store, bad))
    if good.version == bad.version:
        raise DraftwellError(
            f"{good.name} is the champion already: name another release with --to",
            code="already_champion",
        )
    if why := objection(good, gate_record(good)) or withdrawal(good):
        raise DraftwellError(
            f"{good.name} cannot be made champion again, {why}: name another release with --to",
            code="no_way_back",
        )
    note = Withdrawal(reason=reason.strip(), to=good.version, at=_now())
    # first: killed after this, the bad one is still not deployed
    store.set_tag(bad.published, ROLLED_BACK, note.model_dump_json())
    _keep_note(store, bad, "rollbacks", note.model_dump())
    _crown(store, good)
    return bad, good


def _cut_off_rollback(store: Store, champion: ReleaseVersion) -> ReleaseVersion | None:
    """The release whose rollback made this one champion and was killed before its last change, the
    date; None where there is none."""
    since = champion.published.tags.get(CHAMPION_SINCE, "")
    for published in store.versions("release", f"{champion.pair}.{champion.device}"):
        try:
            note = Withdrawal.model_validate_json(published.tags.get(ROLLED_BACK, ""))
        except ValidationError:
            continue
        if note.to == champion.version and note.at > since:
            return find_release(store, champion.pair, champion.device, published.version)
    return None


def _champion_before(store: Store, champion: ReleaseVersion) -> int:
    """Number of the release that was champion last among those whose gate record stands and that
    were not rolled back."""
    others = [
        (p.tags[CHAMPION_SINCE], p.version)
        for p in store.versions("release", f"{champion.pair}.{champion.device}")
        if p.version != champion.version
        and p.tags.get(CHAMPION_SINCE)
        and not p.tags.get(ROLLED_BACK)
    ]
    for _, version in sorted(others, reverse=True):
        release = find_release(store, champion.pair, champion.device, version)
        if objection(release, gate_record(release)) is None:
            return version
    raise DraftwellError(
        f"{champion.name} has no previous champion: name a release that passed its gate with --to",
        code="no_previous_champion",
    )


def adopt(store: Store, release: ReleaseVersion) -> None:
    """Treat a champion that was named by hand as if it had been promoted; nothing changes for one
    that was promoted, or that is no longer the champion."""
    dated = [
        p.tags.get(CHAMPION_SINCE, "")
        for p in store.versions("release", f"{release.pair}.{release.device}")
    ]
    since = release.published.tags.get(CHAMPION_SINCE)
    follow_alias(store, release, "champion")
    if is_champion(store, release) and (not since or since < max(dated)):
        store.set_tag(release.published, CHAMPION_SINCE, _now())


def _crown(store: Store, release: ReleaseVersion) -> None:
    move_alias(store, release, "champion")
    store.set_tag(release.published, CHAMPION_SINCE, _now())


def _keep_note(store: Store, release: ReleaseVersion, folder: str, note: Mapping[str, Any]) -> None:
    """Keep what a person decided with the release's run; tags hold only the last word."""
    at = _now()
    store.log_text(
        release.published,
        json.dumps({"at": at, **note}, indent=2) + "\n",
        f"{folder}/{at.replace(':', '')}.json",
    )


def _now() -> str:
    """This moment, to the microsecond, so that two in a row differ."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
