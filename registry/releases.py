"""Releases: exact versions that are served together, the way to champion, and the way back.

A release `release.<pair>.<device>` is a small artifact that pins a version and digest per kind and names the weights.
Aliases: `candidate` when created, `challenger` once its gate passed, `champion` when promoted. An alias moved by hand
is a wish: promotion and deployment ask for the gate record, which names exact versions.

Promotion is one change of one alias, the release's. The aliases of what it pins follow for people to see; whoever was
cut off between the two leaves a whole promotion, and the next promotion, rollback or deployment lets them follow.
"""

from __future__ import annotations

import datetime
import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from registry.gates import GateCheck, GateRecord
from registry.store import Published, Store
from registry.strict import Strict, validate
from serving.artifacts.base import Artifact, Provenance
from serving.artifacts.kinds import find_kind
from serving.bundle.bundle import ModelRecord
from serving.errors import DraftwellError
from serving.runtime.commands import Role

__all__ = ["GateCheck", "GateRecord", "ReleaseVersion", "adopt", "create_release", "find_release", "gate_record",
           "is_champion", "objection", "promote", "record_gate", "rollback", "withdrawal"]

GATE_HEADING = "## Last gate"
"""Ends a release's own description; behind it comes the last verdict."""
CHAMPION_SINCE = "champion_since"
"""Tag: when a release last became champion, ISO 8601; the way back leads along it."""
ROLLED_BACK = "rolled_back"
"""Tag: a `Withdrawal` as JSON, on a release that was champion and was taken back."""


class Pin(Strict):
    """An exact version of an artifact."""

    version: int = Field(ge=1)
    digest: str


class ReleaseFile(Strict):
    """The contents of `release.json`."""

    device: str
    pins: dict[str, Pin]
    models: dict[Role, ModelRecord]


class Withdrawal(Strict):
    """Why a champion was taken back."""

    reason: str = Field(min_length=1)
    to: int = Field(ge=1, description="release that became champion instead")
    at: str = Field(description="when, ISO 8601")


class Release(Artifact):
    """The artifact of kind release: `release.json`."""

    kind = "release"

    def __init__(self, contents: ReleaseFile, provenance: Provenance):
        self.contents, self.provenance = contents, provenance

    def write_files(self, folder: Path) -> None:
        (folder / "release.json").write_text(json.dumps(self.contents.model_dump(), indent=2, sort_keys=True) + "\n")

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        file = folder / "release.json"
        return cls(validate(ReleaseFile, json.loads(file.read_text()), str(file)), provenance)


@dataclass(frozen=True)
class ReleaseVersion:
    """A registered release, read and checked."""

    pair: str
    device: str
    published: Published
    contents: ReleaseFile

    @property
    def version(self) -> int:
        return self.published.version

    @property
    def fingerprint(self) -> str:
        return self.published.fingerprint

    @property
    def pins(self) -> dict[str, int]:
        """kind → version."""
        return {kind: pin.version for kind, pin in self.contents.pins.items()}

    @property
    def name(self) -> str:
        return f"{self.published.name} version {self.version}"


def create_release(store: Store, pair: str, device: str, pins: Mapping[str, int], models: Mapping[str, ModelRecord],
                   evidence: Mapping[str, Any], *, settings: Mapping[str, Any] | None = None) -> ReleaseVersion:
    """Register a release of published artifacts and let `candidate` name it.

    Args:
        pins: kind → version of `<kind>.<pair>`; all of one fingerprint.
        models: role → where the weights come from (`registry.pairs.model_records`).
        evidence: what it rests on, kept as JSON with the run; numbers at its top are compared by MLflow, and so are the
            figures of everything that is pinned, as `<kind>.<figure>`.
        settings: what MLflow shows as parameters beside the pinned versions, such as the strategy.
    """
    found = {kind: store.resolve(kind, pair, version) for kind, version in sorted(pins.items())}
    contents = ReleaseFile(device=device, models=dict(models),
                           pins={kind: Pin(version=p.version, digest=p.digest) for kind, p in found.items()})
    made = Provenance(pair=pair, fingerprint=_common_fingerprint(found), device_class=device,
                      parents={kind: p.digest for kind, p in found.items()})
    figures = {key: float(value) for key, value in evidence.items()
               if isinstance(value, int | float) and not isinstance(value, bool)}
    for kind, published in found.items():
        figures |= {f"{kind}.{name}": value for name, value in store.metrics(published).items()}
    with tempfile.TemporaryDirectory() as place:
        Release(contents, made).save(Path(place) / "release")
        report = Path(place) / "evidence.json"
        report.write_text(json.dumps(evidence, indent=2, sort_keys=True) + "\n")
        published = store.publish(Path(place) / "release", pair=f"{pair}.{device}", metrics=figures,
                                  parameters={**pins, **(settings or {})}, plots=[report])
    release = ReleaseVersion(pair, device, published, contents)
    _move(store, release, "candidate")
    return release


def _common_fingerprint(found: Mapping[str, Published]) -> str:
    bound = {kind: published.fingerprint for kind, published in found.items() if find_kind(kind).fingerprinted}
    if not bound:
        raise DraftwellError("a release needs at least one artifact besides the draft: run `draftwell tune` first")
    if len(set(bound.values())) > 1:
        each = ", ".join(f"{kind} {value[:12]}" for kind, value in bound.items())
        raise DraftwellError(f"these artifacts belong to different models or dtypes ({each}): calibrate them all again")
    return next(iter(bound.values()))


def find_release(store: Store, pair: str, device: str, version_or_alias: int | str) -> ReleaseVersion:
    """A release by number or alias, its contents read from the registry."""
    published = store.resolve("release", f"{pair}.{device}", version_or_alias)
    with tempfile.TemporaryDirectory() as place:
        release = Release.load(store.download(published, Path(place) / "release"))
    return ReleaseVersion(pair, device, published, release.contents)


def record_gate(store: Store, record: GateRecord, *, words: str = "", figures: Mapping[str, float] | None = None,
                files: Iterable[Path] = ()) -> None:
    """Keep a verdict with its release; a passed one makes the release `challenger`. The record itself is written last.

    Args:
        words: the verdict in Markdown; it becomes the end of the release's description.
        figures: further figures of the bench that MLflow shall compare, beside every check as `gate.<name>`.
        files: reports and plots, kept with the release's run.
    """
    release = find_release(store, record.pair, record.device, record.release_version)
    folder = f"gates/{record.created.replace(':', '')}"
    store.log_text(release.published, record.model_dump_json(indent=2), f"{folder}.json")
    store.log_files(release.published, files, folder)
    store.log_metrics(release.published, {**(figures or {}), **{metric_name(c.name): c.value for c in record.checks}})
    if words:
        store.log_text(release.published, words, f"{folder}.md")
        about = store.description(release.published).partition(GATE_HEADING)[0].rstrip()
        store.describe(release.published, f"{about}\n\n{GATE_HEADING}\n\n{words}")
    store.set_tag(release.published, "gate", "passed" if record.passed else "failed")
    store.set_tag(release.published, "gate_record", record.model_dump_json())
    if record.objection(release.version, release.pins) is None:
        _move(store, release, "challenger")


def metric_name(check: str) -> str:
    """A check's name as a metric of MLflow.

    >>> metric_name("p95 time per token")
    'gate.p95_time_per_token'
    """
    return "gate." + re.sub(r"[^A-Za-z0-9_.-]+", "_", check)


def gate_record(release: ReleaseVersion) -> GateRecord | None:
    """The release's last verdict, or None."""
    text = release.published.tags.get("gate_record")
    if not text:
        return None
    try:
        return GateRecord.model_validate_json(text)
    except ValidationError as error:
        raise DraftwellError(f"the gate record of {release.name} cannot be read: "
                             f"run `draftwell gate --pair {release.pair}`") from error


def objection(release: ReleaseVersion, record: GateRecord | None) -> str | None:
    """Why a release may not be promoted or deployed, or None."""
    if record is None:
        return "it has no gate record"
    if (record.pair, record.device) != (release.pair, release.device):
        return f"the gate record is for {record.pair} on {record.device}"
    return record.objection(release.version, release.pins)


def is_champion(store: Store, release: ReleaseVersion) -> bool:
    """Whether a release is its pair's champion on its device at this moment."""
    return store.get_aliases("release", f"{release.pair}.{release.device}").get("champion") == release.version


def withdrawal(release: ReleaseVersion) -> str | None:
    """Why and when a release was taken back, in a few words, or None."""
    text = release.published.tags.get(ROLLED_BACK)
    if not text:
        return None
    try:
        note = Withdrawal.model_validate_json(text)
    except ValidationError:
        return "it was rolled back"
    return f"it was rolled back on {note.at[:10]} ({note.reason})"


def promote(store: Store, pair: str, device: str, version: int | str, record: GateRecord | None = None, *,
            reason: str | None = None) -> ReleaseVersion:
    """Let `champion` name a release whose gate passed.

    Args:
        record: the verdict; None takes the one that is kept with the release.
        reason: why it shall serve, kept with it; one that was rolled back is not promoted again without, nor one that was judged beside
            another champion than today's.
    Raises:
        DraftwellError: there is no passed verdict that names exactly these versions and today's champion, or it was rolled back; nothing
            was changed.
    """
    release = find_release(store, pair, device, version)
    judged = record or gate_record(release)
    if why := objection(release, judged):
        raise DraftwellError(f"{release.name} is not promoted, {why}: run `draftwell gate --pair {pair}`")
    if (why := _outdated(store, release, judged)) and not reason:
        raise DraftwellError(f"{release.name} is not promoted, {why}: run `draftwell gate --pair {pair} --release {release.version}`, or "
                             "say why it shall serve all the same with --reason")
    if (why := withdrawal(release)) and not reason:
        raise DraftwellError(f"{release.name} is not promoted, {why}: publish another release, or say why this one shall serve again: "
                             f"`draftwell promote --pair {pair} --release {release.version} --reason …`")
    if record is not None:
        record_gate(store, record)
    if reason:
        _keep_note(store, release, "promotions", {"reason": reason})
        store.set_tag(release.published, ROLLED_BACK, "")
    _crown(store, release)
    return release


def _outdated(store: Store, release: ReleaseVersion, record: GateRecord | None) -> str | None:
    """What is wrong with a verdict that holds the release against another champion than today's, or None.

    The champion itself may be promoted again: that finishes a promotion that was cut off.
    """
    champion = store.get_aliases("release", f"{release.pair}.{release.device}").get("champion")
    beside = record.baseline_version if record else None
    if champion is None or champion in (release.version, beside):
        return None
    return f"its gate held it against {f'version {beside}' if beside else 'no champion'}, and version {champion} is the champion now"


def rollback(store: Store, pair: str, device: str, reason: str, to: int | None = None) -> tuple[ReleaseVersion, ReleaseVersion]:
    """Take the champion back: the one before it is champion again.

    The one that is taken back keeps the reason, and is neither promoted again without one, nor deployed.

    Args:
        to: number of the release that shall be champion; None takes the champion before, leaving out all that were rolled back.
    One that was cut off is finished when it is run again, and takes nothing else back.

    Returns:
        the release that was taken back, and the one that is champion now.
    Raises:
        DraftwellError: no reason, no champion, none before it, or no passed gate record of that; nothing was changed.
    """
    if not reason.strip():
        raise DraftwellError("a rollback needs a reason, which is kept with the release: name it with --reason")
    bad = find_release(store, pair, device, "champion")
    if (cut_off := _cut_off_rollback(store, bad)) is not None and to in (None, bad.version):
        _crown(store, bad)
        return cut_off, bad
    good = find_release(store, pair, device, to if to is not None else _champion_before(store, bad))
    if good.version == bad.version:
        raise DraftwellError(f"{good.name} is the champion already: name another release with --to")
    if why := objection(good, gate_record(good)) or withdrawal(good):
        raise DraftwellError(f"{good.name} does not come back, {why}: name another release with --to")
    note = Withdrawal(reason=reason.strip(), to=good.version, at=_now())
    store.set_tag(bad.published, ROLLED_BACK, note.model_dump_json())  # first: cut off here, the bad one is not deployed any more
    _keep_note(store, bad, "rollbacks", note.model_dump())
    _crown(store, good)
    return bad, good


def _cut_off_rollback(store: Store, champion: ReleaseVersion) -> ReleaseVersion | None:
    """The release whose rollback made this one champion and was killed before its last change, the date; None where there is none."""
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
    """Number of the release that was champion last among those whose gate record stands and that were not rolled back."""
    others = [(p.tags[CHAMPION_SINCE], p.version) for p in store.versions("release", f"{champion.pair}.{champion.device}")
              if p.version != champion.version and p.tags.get(CHAMPION_SINCE) and not p.tags.get(ROLLED_BACK)]
    for _, version in sorted(others, reverse=True):
        release = find_release(store, champion.pair, champion.device, version)
        if objection(release, gate_record(release)) is None:
            return version
    raise DraftwellError(f"{champion.name} has no champion before it: name a release that passed its gate with --to")


def adopt(store: Store, release: ReleaseVersion) -> None:
    """Let everything follow a champion that was named by hand, as if it had been promoted; of one that was promoted, or is not the
    champion any more, nothing changes."""
    dated = [p.tags.get(CHAMPION_SINCE, "") for p in store.versions("release", f"{release.pair}.{release.device}")]
    since = release.published.tags.get(CHAMPION_SINCE)
    _follow(store, release, "champion")
    if is_champion(store, release) and (not since or since < max(dated)):
        store.set_tag(release.published, CHAMPION_SINCE, _now())


def _crown(store: Store, release: ReleaseVersion) -> None:
    _move(store, release, "champion")
    store.set_tag(release.published, CHAMPION_SINCE, _now())


def _move(store: Store, release: ReleaseVersion, alias: str) -> None:
    """Let an alias name a release, which is the whole step, and then all that it pins."""
    store.set_alias(release.published, alias)
    _follow(store, release, alias)


def _follow(store: Store, release: ReleaseVersion, alias: str) -> None:
    """Let an alias name all that a release pins.

    Where another process moves the release's alias meanwhile, its pins are followed instead: whoever moved it last looks
    again after everybody else's changes, so that the end is one release and its pins.
    """
    while True:
        for kind, version in release.pins.items():
            if store.get_aliases(kind, release.pair).get(alias) != version:
                store.set_alias(store.resolve(kind, release.pair, version), alias)
        now = store.get_aliases("release", f"{release.pair}.{release.device}").get(alias)
        if now is None or now == release.version:
            return
        release = find_release(store, release.pair, release.device, now)


def _keep_note(store: Store, release: ReleaseVersion, folder: str, note: Mapping[str, Any]) -> None:
    """Keep what a person decided with the release's run; tags hold only the last word."""
    at = _now()
    store.log_text(release.published, json.dumps({"at": at, **note}, indent=2) + "\n", f"{folder}/{at.replace(':', '')}.json")


def _now() -> str:
    """This moment, to the microsecond, so that two in a row are told apart."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
