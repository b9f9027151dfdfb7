"""Which release serves: promotion to champion, and rollback.

A change of the champion is first written to its record (`draftwell.registry.promotion_log`), which
decides between two at once; then the release's alias follows, and after it those of what it pins,
for people to see. What a killed process has begun is finished by the next promotion, rollback or
deployment.
"""

from __future__ import annotations

from datetime import datetime

from draftwell.registry.gates import GateRecord
from draftwell.registry.promotion_log import DONE, Entry, History, What, append, history
from draftwell.registry.releases import (
    ReleaseVersion,
    changed_report,
    device_options,
    find_release,
    follow_alias,
    gate_record,
    is_champion,
    move_alias,
    objection,
    record_gate,
    release_settings,
    standing_record,
    suppress_gone,
)
from draftwell.registry.store import Store
from draftwell.registry.webhooks_out import send_event
from draftwell.serving.errors import DraftwellError

CHAMPION_SINCE, ROLLED_BACK = "champion_since", "rolled_back"
"""Tags of a release: when it last became champion (ISO 8601; of registries from before the record),
and when and why it was rolled back. They count where the record does not name the release."""


def withdrawal(store: Store, release: ReleaseVersion) -> str | None:
    """Why and when a release was rolled back, or None."""
    changes = history(store, release.pair, release.device)
    if entry := changes.rolled_back(release.version):
        return f"it was rolled back on {entry.at:%Y-%m-%d} ({entry.change.reason})"
    note = release.published.tags.get(ROLLED_BACK)
    if not note or changes.was_promoted(release.version):
        return None
    return f"it was rolled back ({note})"


def champion_since(store: Store, release: ReleaseVersion) -> datetime | None:
    """When a release last became champion; None if it never was."""
    entry = history(store, release.pair, release.device).became_champion(release.version)
    if entry is not None:
        return entry.at
    tag = release.published.tags.get(CHAMPION_SINCE)
    try:
        return datetime.fromisoformat(tag) if tag else None
    except ValueError:  # edited in MLflow
        return None


def deployment_objection(store: Store, release: ReleaseVersion) -> str | None:
    """Why a release's gate record does not let it be deployed, or None."""
    promoted = (
        history(store, release.pair, release.device).was_promoted(release.version)
        or CHAMPION_SINCE in release.published.tags
    )
    return objection(release, gate_record(release), again=promoted)


def promote(
    store: Store,
    pair: str,
    device: str,
    version: int | str,
    record: GateRecord | None = None,
    *,
    reason: str | None = None,
    dry_run: bool = False,
) -> ReleaseVersion:
    """Make a release whose gate passed the champion.

    Args:
        record: the verdict; None takes the one that is kept with the release.
        reason: kept in the record; required for a release that was rolled back, and for one whose
            gate compared it with another champion than today's, or judged it on other prompts.
        dry_run: only check that it may be promoted.
    Raises:
        DraftwellError: there is no passed verdict that names exactly these versions and today's
            champion, or its reports were changed, or it was rolled back, or another became
            champion meanwhile (`promotion_lost`); the champion stays.
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
    _check_reports(store, release, judged)
    seen = history(store, pair, device) if dry_run else adopt(store, pair, device)
    if (why := outdated(store, release, judged)) and not reason:
        raise DraftwellError(
            f"{release.name} is not promoted, {why}: run `draftwell gate --pair {pair} "
            f"{device_options(device)} --release "
            f"{release.version}`, or promote it all the same with --set reason=…",
            code="gated_against_another_champion",
        )
    if (why := withdrawal(store, release)) and not reason:
        raise DraftwellError(
            f"{release.name} is not promoted, {why}: publish another release, or promote "
            "this one again with "
            f"a reason: `draftwell release promote --pair {pair} {release_settings(device)} "
            f"--release "
            f"{release.version} --set reason=…`",
            code="was_rolled_back",
        )
    if dry_run:
        return release
    if record is not None:
        record_gate(store, record)
    if reason or not (seen.champion == release.version and is_champion(store, release)):
        _change(store, seen, release, "promotion", reason, judged)
    return release


def _check_reports(store: Store, release: ReleaseVersion, record: GateRecord | None) -> None:
    """Refuse a verdict whose reports are not those that were kept with it.

    Raises:
        DraftwellError: one was changed or deleted (`gate_report_changed`).
    """
    if record is not None and (name := changed_report(store, release, record)) is not None:
        raise DraftwellError(
            f"{release.name} is not promoted, {name}, which was kept with its gate record, was "
            f"changed or deleted since: run `draftwell gate --pair {release.pair} "
            f"{device_options(release.device)} --release {release.version}`",
            code="gate_report_changed",
        )


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
    store: Store,
    pair: str,
    device: str,
    reason: str,
    to: int | None = None,
    *,
    dry_run: bool = False,
) -> tuple[ReleaseVersion, ReleaseVersion]:
    """Make the previous champion the champion again.

    The record keeps the reason. The release that is rolled back is not deployed, nor promoted again
    without another reason. A rollback that was killed is finished when it is run again, and rolls
    nothing else back.

    Args:
        to: number of the release to make champion; None takes the previous champion, leaving out
            all that were rolled back.
        dry_run: only find both.

    Returns:
        the release that was rolled back, and the champion now.
    Raises:
        DraftwellError: no reason, no champion, none before it, or no passed gate record of that,
            or another became champion meanwhile; the champion stays.
    """
    if not reason.strip():
        raise DraftwellError(
            "a rollback needs a reason, which is recorded: give one with --reason",
            code="no_reason",
        )
    cut_off = _cut_off_rollback(history(store, pair, device))
    seen = history(store, pair, device) if dry_run else adopt(store, pair, device)
    if (
        cut_off
        and cut_off.before
        and cut_off.number == seen[-1].number
        and to in (None, seen.champion)
    ):
        good = find_release(store, pair, device, cut_off.change.release)
        return find_release(store, pair, device, cut_off.before), good
    bad = _recorded_champion(store, pair, device, seen)
    good = find_release(store, pair, device, to if to is not None else _way_back(store, bad, seen))
    if good.version == bad.version:
        raise DraftwellError(
            f"{good.name} is the champion already: name another release with --release",
            code="already_champion",
        )
    if why := objection(good, gate_record(good), again=True) or withdrawal(store, good):
        raise DraftwellError(
            f"{good.name} cannot be made champion again, {why}: name another with --release",
            code="no_way_back",
        )
    if not dry_run:
        _change(store, seen, good, "rollback", reason.strip(), gate_record(good))
    return bad, good


def _recorded_champion(store: Store, pair: str, device: str, seen: History) -> ReleaseVersion:
    """The champion by the record, or by the alias where nothing is recorded."""
    try:
        return find_release(store, pair, device, seen.champion or "champion")
    except DraftwellError as error:
        if seen.champion is None or error.code != "not_registered":
            raise
        raise DraftwellError(
            f"version {seen.champion} of release.{pair}.{device}, the champion, was deleted in "
            f"MLflow: name another with `draftwell release promote --pair {pair} "
            f"{release_settings(device)} --release N`",
            code="champion_deleted",
        ) from None


def _cut_off_rollback(seen: History) -> Entry | None:
    """The last change, if it is a rollback whose process was killed before its end."""
    last = seen[-1] if seen else None
    return last if last and not last.done and last.change.what == "rollback" else None


def _way_back(store: Store, champion: ReleaseVersion, seen: History) -> int:
    """Number of the release that was champion last among those whose gate record stands and that
    were not rolled back."""
    versions = store.versions("release", f"{champion.pair}.{champion.device}")
    dated = [(p.tags[CHAMPION_SINCE], p.version) for p in versions if CHAMPION_SINCE in p.tags]
    tagged = [number for _, number in sorted(dated, reverse=True)]
    for version in dict.fromkeys((*seen.earlier_champions(), *tagged)):
        release = None
        with suppress_gone():
            release = find_release(store, champion.pair, champion.device, version)
        if release is None:
            continue
        why = objection(release, standing_record(release), again=True) or withdrawal(store, release)
        if why is None and version != champion.version:
            return version
    raise DraftwellError(
        f"{champion.name} has no previous champion: name a release that passed its gate with "
        f"--release",
        code="no_previous_champion",
    )


def adopt(store: Store, pair: str, device: str) -> History:
    """Make alias and record agree: finish a change whose process was killed, or record a champion
    that a person named by hand; returns the record. Whoever moves the alias in MLflow meanwhile,
    or after a process was killed, has the last word."""
    moved: Entry | None = None
    while True:
        seen = history(store, pair, device)
        last = seen[-1] if seen else None
        # Whoever has set the alias looks again: another may have come after it, and been faster.
        if last is not None and (not last.done or (moved and moved.number != last.number)):
            release = None  # where it was deleted in MLflow, no alias can name it
            with suppress_gone():
                release = find_release(store, pair, device, last.change.release)
            # again, as that takes a while: what came meanwhile must not be undone
            if history(store, pair, device)[-1].number != last.number:
                continue
            if release is not None and _may_set_alias(store, release, last, moved):
                move_alias(store, release, "champion")
                moved = last
            else:
                moved = None
                if release is not None:
                    follow_alias(store, release, "champion")
            _follow_tags(store, pair, device, last)  # first: what is done is not looked at again
            store.set_tag(last.kept, DONE, "yes")
            _tell(pair, device, last)
            continue
        # Read after the record: an alias that another has moved since belongs to a later change.
        alias = store.get_aliases("release", f"{pair}.{device}").get("champion")
        if alias in (None, seen.champion):
            return seen
        moved = None
        append(store, find_release(store, pair, device, alias), seen, "by hand")


def _may_set_alias(store: Store, release: ReleaseVersion, last: Entry, moved: Entry | None) -> bool:
    """Whether the alias is where the last change, or this process' own (`moved`), has left it.

    A person who moved it since came later, and MLflow itself does not compare before it sets. What
    a person has set needs no setting.
    """
    alias = store.get_aliases("release", f"{release.pair}.{release.device}").get("champion")
    if moved is not None and alias == moved.change.release:
        return True
    return last.change.what != "by hand" and alias in (None, last.before)


def _follow_tags(store: Store, pair: str, device: str, last: Entry) -> None:
    """Keep with the releases which of them is rolled back, for when the record is renamed or
    deleted in MLflow."""
    change = last.change
    with suppress_gone():
        if change.what == "rollback" and last.before:
            bad = store.resolve("release", f"{pair}.{device}", last.before)
            store.set_tag(bad, ROLLED_BACK, f"{last.at:%Y-%m-%d}, {change.reason}")
        elif change.what == "promotion":
            good = store.resolve("release", f"{pair}.{device}", change.release)
            if ROLLED_BACK in good.tags:
                store.delete_tag(good, ROLLED_BACK)


def _tell(pair: str, device: str, entry: Entry) -> None:
    """Send the webhook of a change that is finished; the change's own mark is its id, because two
    processes may finish one."""
    change = entry.change
    send_event(
        "release.rolled_back" if change.what == "rollback" else "release.promoted",
        {
            "pair": pair,
            "device": device,
            "release": change.release,
            "before": entry.before,
            "what": change.what,
            "by": change.by,
            "reason": change.reason,
        },
        change.mark,
    )


def _change(
    store: Store,
    seen: History,
    release: ReleaseVersion,
    what: What,
    reason: str | None,
    record: GateRecord | None,
) -> None:
    """Make a release champion, if no change has come after those that were seen."""
    change = append(store, release, seen, what, reason, record)
    now = adopt(store, release.pair, release.device)
    if now.champion == release.version or any(e.change.mark == change.mark for e in now):
        return
    last = now[-1].change
    raise DraftwellError(
        f"{release.name} did not become champion: version {last.release} did meanwhile "
        f"({last.what} {last.by}): run `draftwell gate --pair {release.pair} "
        f"{device_options(release.device)} --release {release.version}` to compare the two",
        code="promotion_lost",
    )
