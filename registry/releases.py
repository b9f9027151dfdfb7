"""Releases: exact versions that are served together, and the way to champion.

A release `release.<pair>.<device>` is a small artifact that pins a version and digest per kind and names the weights.
Aliases: `candidate` when created, `challenger` once its gate passed, `champion` when promoted. An alias moved by hand
is a wish: promotion and deployment ask for the gate record, which names exact versions.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from registry.gates import GateCheck, GateRecord
from registry.store import Published, Store
from registry.strict import Strict, validate
from serving.runtime.artifacts.base import Artifact, Provenance
from serving.runtime.bundle import UNBOUND, ModelRecord
from serving.runtime.types import DraftwellError, Role

__all__ = ["GateCheck", "GateRecord", "ReleaseVersion", "create_release", "find_release", "gate_record", "objection",
           "promote", "record_gate"]


class Pin(Strict):
    """An exact version of an artifact."""

    version: int = Field(ge=1)
    digest: str


class ReleaseFile(Strict):
    """The contents of `release.json`."""

    device: str
    pins: dict[str, Pin]
    models: dict[Role, ModelRecord]


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
                   evidence: Mapping[str, Any]) -> ReleaseVersion:
    """Register a release of published artifacts and let `candidate` name it.

    Args:
        pins: kind → version of `<kind>.<pair>`; all of one fingerprint.
        models: role → where the weights come from (`registry.pairs.model_records`).
        evidence: what it rests on, kept as JSON with the run; numbers at its top are compared by MLflow.
    """
    found = {kind: store.resolve(kind, pair, version) for kind, version in sorted(pins.items())}
    contents = ReleaseFile(device=device, models=dict(models),
                           pins={kind: Pin(version=p.version, digest=p.digest) for kind, p in found.items()})
    made = Provenance(pair=pair, fingerprint=_common_fingerprint(found), device_class=device,
                      parents={kind: p.digest for kind, p in found.items()})
    figures = {key: float(value) for key, value in evidence.items()
               if isinstance(value, int | float) and not isinstance(value, bool)}
    with tempfile.TemporaryDirectory() as place:
        Release(contents, made).save(Path(place) / "release")
        report = Path(place) / "evidence.json"
        report.write_text(json.dumps(evidence, indent=2, sort_keys=True) + "\n")
        words = f"{pair} on {device}: " + ", ".join(f"{kind} {p.version}" for kind, p in found.items())
        published = store.publish(Path(place) / "release", pair=f"{pair}.{device}", metrics=figures,
                                  parameters=dict(pins), plots=[report], description=words)
    release = ReleaseVersion(pair, device, published, contents)
    _move(store, release, "candidate")
    return release


def _common_fingerprint(found: Mapping[str, Published]) -> str:
    bound = {kind: published.fingerprint for kind, published in found.items() if kind not in UNBOUND}
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


def record_gate(store: Store, record: GateRecord) -> None:
    """Keep a verdict with its release; a passed one makes the release `challenger`."""
    release = find_release(store, record.pair, record.device, record.release_version)
    store.log_text(release.published, record.model_dump_json(indent=2), f"gates/{record.created.replace(':', '')}.json")
    store.set_tag(release.published, "gate_record", record.model_dump_json())
    store.set_tag(release.published, "gate", "passed" if record.passed else "failed")
    if record.objection(release.version, release.pins) is None:
        _move(store, release, "challenger")


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


def promote(store: Store, pair: str, device: str, version: int | str,
            record: GateRecord | None = None) -> ReleaseVersion:
    """Let `champion` name a release whose gate passed; the champion before it is kept as its tag `previous`.

    Args:
        record: the verdict; None takes the one that is kept with the release.
    Raises:
        DraftwellError: there is no passed verdict that names exactly these versions; nothing was changed.
    """
    release = find_release(store, pair, device, version)
    if why := objection(release, record or gate_record(release)):
        raise DraftwellError(f"{release.name} is not promoted, {why}: run `draftwell gate --pair {pair}`")
    if record is not None:
        record_gate(store, record)
    previous = store.get_aliases("release", f"{pair}.{device}").get("champion")
    if previous is not None and previous != release.version:
        store.set_tag(release.published, "previous", str(previous))
    _move(store, release, "champion")
    return release


def _move(store: Store, release: ReleaseVersion, alias: str) -> None:
    """Let an alias name a release and all that it pins; the release comes last, it alone is asked when deploying."""
    for kind, version in release.pins.items():
        store.set_alias(store.resolve(kind, release.pair, version), alias)
    store.set_alias(release.published, alias)
