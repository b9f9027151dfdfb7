"""Releases: exact versions that are served together, and the verdicts of their gates.

A release `release.<pair>.<device>` is a small artifact that pins a version and digest per kind and
names the weights. Aliases: `candidate` when created, `challenger` once its gate passed, `champion`
when promoted (`draftwell.registry.promotion`). An alias moved by hand is only a request: promotion
and deployment ask for the gate record, which names exact versions. What a release pins follows it
under aliases that name the device too, such as `champion-cuda`: releases for several devices share
verifiers and tables.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from draftwell.registry.gates import GateRecord, thresholds_digest
from draftwell.registry.record_signature import check_record, sign_record
from draftwell.registry.store import Published, Store
from draftwell.registry.strict import Strict, validate
from draftwell.registry.webhooks_out import send_event
from draftwell.serving.artifacts.base import Artifact, Provenance
from draftwell.serving.artifacts.kinds import find_kind, refuse_other_device
from draftwell.serving.bundle.bundle import ModelRecord
from draftwell.serving.bundle.verdict import PASSED
from draftwell.serving.device import DEVICES
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Role
from draftwell.serving.temperature import class_of

__all__ = [
    "GateRecord",
    "ReleaseVersion",
    "changed_report",
    "create_release",
    "device_options",
    "engine_device",
    "find_release",
    "gate_record",
    "is_champion",
    "objection",
    "record_gate",
    "release_settings",
    "standing_record",
]

FORGOTTEN = "forgotten"
"""Tag of a release: what it pins that was deleted with a tenant's traffic."""
GONE = ("not_registered", "published_files_missing", "pinned_artifact_changed")
"""Codes of what a person, or `draftwell release forget`, has deleted."""
GATE_HEADING = "## Last gate"
"""Ends a release's own description; after it comes the last verdict."""


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
        (folder / "release.json").write_text(
            json.dumps(self.contents.model_dump(), indent=2, sort_keys=True) + "\n"
        )

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


def engine_device(device: str, engine: str, temperature: float = 0.0) -> str:
    """The device of releases for an engine, as their names have it: ours is not named, and dots are
    left out, because MLflow's aliases hold none.

    >>> engine_device("cpu", "draftwell"), engine_device("cpu", "vllm", 0.7)
    ('cpu', 'cpu-vllm-sampled')
    >>> engine_device("cpu", "llama.cpp")
    'cpu-llamacpp'
    """
    if engine == "draftwell":
        return device
    requests = "" if class_of(temperature) == "greedy" else "-sampled"
    return f"{device}-{engine.replace('.', '')}{requests}"


def device_options(device: str, sampled: str = "--set sampled=true") -> str:
    """The options that name a device of releases on the command line.

    Args:
        sampled: how the command names the release for sampled requests.

    >>> device_options("cpu"), device_options("cpu-vllm-sampled")
    ('--device cpu', '--device cpu --engine vllm --set sampled=true')
    >>> device_options("cpu-llamacpp")
    '--device cpu --engine llama.cpp'
    """
    place, _, engine = device.partition("-")
    name, _, requests = engine.partition("-")
    name = name.replace("llamacpp", "llama.cpp")
    named = [f"--device {place}", f"--engine {name}" if name else "", sampled if requests else ""]
    return " ".join(filter(None, named))


def release_settings(device: str) -> str:
    """The settings that name a device of releases to the commands of `draftwell release`.

    >>> release_settings("cpu-vllm-sampled")
    '--set device=cpu --set engine=vllm --set sampled=true'
    """
    words = device_options(device).replace("--device ", "--set device=")
    return words.replace("--engine ", "--set engine=")


def create_release(
    store: Store,
    pair: str,
    device: str,
    pins: Mapping[str, int],
    models: Mapping[str, ModelRecord],
    evidence: Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
) -> ReleaseVersion:
    """Register a release of published artifacts; it becomes `candidate`.

    Args:
        pins: kind → version of `<kind>.<pair>`; all of one fingerprint.
        models: role → where the weights come from (`draftwell.registry.pairs.model_records`).
        evidence: what it is based on, kept as JSON with the run; numbers at its top level are
            compared by MLflow, and so are the metrics of everything that is pinned, as
            `<kind>.<metric>`.
        settings: what MLflow shows as parameters next to the pinned versions, such as the strategy.
    Raises:
        DraftwellError: nothing to pin, artifacts of different models, or a config or profile that
            was made on another device.
    """
    found = {kind: store.resolve(kind, pair, version) for kind, version in sorted(pins.items())}
    for kind, published in found.items():
        refuse_other_device(
            kind,
            published.tags.get("device_class"),
            device,
            f"{published.name} version {published.version}",
        )
    contents = ReleaseFile(
        device=device,
        models=dict(models),
        pins={kind: Pin(version=p.version, digest=p.digest) for kind, p in found.items()},
    )
    made = Provenance(
        pair=pair,
        fingerprint=common_fingerprint(found),
        device_class=device,
        parents={kind: p.digest for kind, p in found.items()},
    )
    with tempfile.TemporaryDirectory() as place:
        Release(contents, made).save(Path(place) / "release")
        report = Path(place) / "evidence.json"
        report.write_text(json.dumps(evidence, indent=2, sort_keys=True) + "\n")
        published = store.publish(
            Path(place) / "release",
            pair=f"{pair}.{device}",
            metrics=_figures(store, found, evidence),
            parameters={**pins, **(settings or {})},
            plots=[report],
        )
    release = ReleaseVersion(pair, device, published, contents)
    move_alias(store, release, "candidate")
    return release


def _figures(
    store: Store, found: Mapping[str, Published], evidence: Mapping[str, Any]
) -> dict[str, float]:
    """The numbers of the evidence, and the metrics of everything that is pinned."""
    figures = {
        key: float(value)
        for key, value in evidence.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    for kind, published in found.items():
        figures |= {f"{kind}.{name}": value for name, value in store.metrics(published).items()}
    return figures


@contextmanager
def suppress_gone() -> Iterator[None]:
    """Pass over a version that was deleted in MLflow, or whose files were."""
    try:
        yield
    except DraftwellError as error:
        if error.code not in GONE:
            raise


def pinned_version(store: Store, release: ReleaseVersion, kind: str) -> Published:
    """The version of a kind that a release pins.

    Raises:
        DraftwellError: it was deleted, or is another (`pinned_artifact_changed`).
    """
    pin, found = release.contents.pins[kind], None
    with suppress_gone():
        found = store.resolve(kind, release.pair, pin.version)
    if found is None or found.digest != pin.digest:
        what = "was deleted or renamed in MLflow" if found is None else "is another now"
        raise DraftwellError(
            f"{release.name} pins {kind}.{release.pair} version {pin.version}, which {what}: name "
            f"the model {kind}.{release.pair} again if it was renamed, else make another release "
            f"(`draftwell release create --pair {release.pair} "
            f"{release_settings(release.device)}`, or the "
            "pipeline)",
            code="pinned_artifact_changed",
        )
    return found


def common_fingerprint(found: Mapping[str, Published]) -> str:
    """The fingerprint of the models that all these versions belong to.

    Raises:
        DraftwellError: they belong to none (`nothing_to_release`), or to several
            (`mixed_fingerprints`).
    """
    bound = [one for kind, one in found.items() if find_kind(kind).fingerprinted]
    if not bound:
        raise DraftwellError(
            "a release needs at least one artifact besides the draft: run `draftwell step "
            "choose` first",
            code="nothing_to_release",
        )
    if len({one.fingerprint for one in bound}) > 1:
        each = ", ".join(
            f"{one.kind} version {one.version} {one.fingerprint[:12]}" for one in bound
        )
        raise DraftwellError(
            f"these versions belong to different models or dtypes ({each}): pick versions with one "
            "fingerprint, which MLflow shows as a tag, or calibrate them all again",
            code="mixed_fingerprints",
        )
    return bound[0].fingerprint


def find_release(
    store: Store, pair: str, device: str, version_or_alias: int | str
) -> ReleaseVersion:
    """A release by number or alias, its contents read from the registry."""
    published = resolve_release(store, pair, device, version_or_alias)
    with tempfile.TemporaryDirectory() as place:
        release = Release.load(store.download(published, Path(place) / "release"))
    return ReleaseVersion(pair, device, published, release.contents)


def resolve_release(store: Store, pair: str, device: str, version_or_alias: int | str) -> Published:
    """A release's version; where there is none, the error names releases for other devices."""
    try:
        return store.resolve("release", f"{pair}.{device}", version_or_alias)
    except DraftwellError as error:
        if error.code != "not_registered":
            raise
        known = aliases_by_device(store, pair)
        hint = no_release_hint({name: known[name] for name in known if name != device}, device)
        if device == "cuda" and device not in known:
            hint += "; without such a device here, `draftwell reproduce import` makes one"
        raise DraftwellError(f"{error}{hint}", code=error.code) from None


def aliases_by_device(store: Store, pair: str) -> dict[str, dict[str, int]]:
    """device → alias → number, of the devices that a pair has releases for."""
    return {
        device: store.get_aliases("release", f"{pair}.{device}")
        for device in DEVICES
        if store.versions("release", f"{pair}.{device}")
    }


def no_release_hint(known: Mapping[str, Mapping[str, int]], device: str) -> str:
    """What a pair has instead of a release that was looked for: on this device first, then on
    others; nothing where it has none.

    >>> no_release_hint({"cpu": {"candidate": 3}}, "cuda")
    '; for cpu it has candidate = 3 (device cpu)'
    """
    words = []
    for name, aliases in known.items():
        have = (
            ", ".join(f"{alias} = {number}" for alias, number in aliases.items())
            or "releases without an alias"
        )
        option = "--release" if name == device else f"device {name}"
        words.append(f"; for {name} it has {have} ({option})")
    return "".join(words)


def record_gate(
    store: Store,
    record: GateRecord,
    *,
    words: str = "",
    figures: Mapping[str, float] | None = None,
    files: Iterable[Path] = (),
) -> None:
    """Keep a verdict with its release; a passed one makes the release `challenger`. The record
    itself is written last.

    Args:
        words: the verdict in Markdown; it becomes the end of the release's description.
        figures: further metrics of the bench for MLflow to compare, in addition to every check as
            `gate.<name>`.
        files: reports and plots, kept with the release's run; their digests become part of the
            record, which is signed where a key is named (`record_signature`).
    """
    files = list(files)
    reports = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    record = record.model_copy(update={"reports": reports or record.reports})
    text = record.model_dump_json()
    signature = sign_record(text)
    release = find_release(store, record.pair, record.device, record.release_version)
    folder = reports_folder(record)
    store.log_text(release.published, text, f"{folder}.json")
    store.log_files(release.published, files, folder)
    store.log_metrics(
        release.published,
        {**(figures or {}), **{metric_name(c.name): c.value for c in record.checks}},
    )
    if words:
        store.log_text(release.published, words, f"{folder}.md")
        about = store.description(release.published).partition(GATE_HEADING)[0].rstrip()
        store.describe(release.published, f"{about}\n\n{GATE_HEADING}\n\n{words}")
    store.set_tag(release.published, "gate", record.result)
    if signature is not None:
        store.log_text(release.published, signature, f"{folder}.json.sigstore.json")
        store.set_tag(release.published, signature_tag(text), signature)
    store.set_tag(release.published, "gate_record", text)
    if record.objection(release.version, release.pins, release.published.digest) is None:
        move_alias(store, release, "challenger")
    if record.result != PASSED:
        tell_refused(release, record.result, [check.name for check in record.unmet])


def tell_refused(
    release: ReleaseVersion, why: str, checks: Iterable[str] = (), mark: str | None = None
) -> None:
    """Send the webhook of a release that a gate, or a deployment, did not let pass.

    Args:
        mark: as `send_event` has it.
    """
    send_event(
        "release.refused",
        {
            "pair": release.pair,
            "device": release.device,
            "release": release.version,
            "digest": release.published.digest,
            "why": why,
            "checks": list(checks),
        },
        mark,
    )


def reports_folder(record: GateRecord) -> str:
    """Where a record's reports are kept with the release's run."""
    return f"gates/{record.created.replace(':', '')}"


def changed_report(store: Store, release: ReleaseVersion, record: GateRecord) -> str | None:
    """Name of a report that is not as the gate kept it, or is gone; None where all are."""
    for name, digest in sorted(record.reports.items()):
        found = store.read_file(release.published, f"{reports_folder(record)}/{name}")
        if found is None or hashlib.sha256(found).hexdigest() != digest:
            return name
    return None


def metric_name(check: str) -> str:
    """A check's name as a metric of MLflow.

    >>> metric_name("time per token")
    'gate.time_per_token'
    """
    return "gate." + re.sub(r"[^A-Za-z0-9_.-]+", "_", check)


def signature_tag(text: str) -> str:
    """The tag of a record's signature: one of its own for each, so that a process that is killed
    between both tags leaves the earlier record with its signature."""
    return f"gate_signature.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def gate_record(release: ReleaseVersion) -> GateRecord | None:
    """The release's last verdict, or None.

    Raises:
        DraftwellError: it cannot be read, or is not signed although a public key is named
            (`check_record`).
    """
    tags = release.published.tags
    text = tags.get("gate_record")
    if not text:
        return None
    check_record(text, tags.get(signature_tag(text)), release.name)
    try:
        return GateRecord.model_validate_json(text)
    except ValidationError as error:
        raise DraftwellError(
            f"the gate record of {release.name} cannot be read: "
            f"run `draftwell gate --pair {release.pair} {device_options(release.device)} "
            f"--release {release.version}`",
            code="gate_record_unreadable",
        ) from error


def standing_record(release: ReleaseVersion) -> GateRecord | None:
    """The release's last verdict, or None; one that is not signed as it has to be counts as none.
    Promotion and deployment ask for `gate_record`, which refuses it."""
    try:
        return gate_record(release)
    except DraftwellError as error:
        if error.code != "gate_record_unsigned":
            raise
        return None


def objection(
    release: ReleaseVersion, record: GateRecord | None, *, again: bool = False
) -> str | None:
    """Why a release may not be promoted or deployed, or None.

    Args:
        again: it was champion before, so that thresholds that were changed since do not count.
    """
    if gone := release.published.tags.get(FORGOTTEN):
        return f"its {gone} was deleted with a tenant's traffic (`draftwell release forget`)"
    if record is None:
        return "it has no gate record"
    if (record.pair, record.device) != (release.pair, release.device):
        return f"the gate record is for {record.pair} on {record.device}"
    if why := record.objection(release.version, release.pins, release.published.digest):
        return why
    if not again and record.thresholds != thresholds_digest():
        return "it was judged by other thresholds than gates.yaml has"
    return None


def is_champion(store: Store, release: ReleaseVersion) -> bool:
    """Whether a release is its pair's champion on its device at this moment."""
    return (
        store.get_aliases("release", f"{release.pair}.{release.device}").get("champion")
        == release.version
    )


def move_alias(store: Store, release: ReleaseVersion, alias: str) -> None:
    """Let an alias name a release, which completes the step, and then all that it pins."""
    store.set_alias(release.published, alias)
    follow_alias(store, release, alias)


def follow_alias(store: Store, release: ReleaseVersion, alias: str) -> None:
    """Let an alias, with the device's name, name all that a release pins.

    Where another process moves the release's alias meanwhile, its pins are followed instead:
    whoever moved it last looks again after everybody else's changes, so that the end is one release
    and its pins. A pin that was deleted in MLflow has no alias: these are for people to see, and
    a deployment refuses what it lacks.
    """
    while True:
        for kind, version in release.pins.items():
            own = f"{alias}-{release.device}"
            if store.get_aliases(kind, release.pair).get(own) != version:
                with suppress_gone():
                    store.set_alias(store.resolve(kind, release.pair, version), own)
        now = store.get_aliases("release", f"{release.pair}.{release.device}").get(alias)
        if now is None or now == release.version:
            return
        release = find_release(store, release.pair, release.device, now)
