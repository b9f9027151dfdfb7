"""Building a bundle from a release: `make deploy`.

Data files and the runtime's own wheel, every digest checked on the way. The folder is built next to
its place and renamed, then the link `current` is moved: a server that watches it sees the old
bundle or the new one, and an existing bundle is never changed or removed. Two builds of one release
with one runtime are byte-identical on one machine: nothing in them depends on time, machine or user
but the library of the layers (`compiled/`), which was made there once and is left unused by other
processors.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from draftwell.registry.bundles.judged import take_judged
from draftwell.registry.bundles.places import (
    building,
    copy_model,
    link_current,
    set_rights,
    standing,
)
from draftwell.registry.bundles.requirements import Lock, locked, requirements_name
from draftwell.registry.bundles.sbom import SBOM, bill_of_materials
from draftwell.registry.bundles.signing import sign
from draftwell.registry.bundles.text import bundle_texts
from draftwell.registry.bundles.wheel import Wheel, runtime_wheel
from draftwell.registry.pairs.catalogue import PairSpec
from draftwell.registry.pairs.records import model_records
from draftwell.registry.promotion import adopt, deployment_objection, withdrawal
from draftwell.registry.release_card import kept_card
from draftwell.registry.releases import (
    ReleaseVersion,
    find_release,
    gate_record,
    is_champion,
    pinned_version,
    release_settings,
)
from draftwell.registry.store import Published, Store
from draftwell.serving.artifacts.base import read_manifest
from draftwell.serving.artifacts.checkpoint import packages_of
from draftwell.serving.artifacts.compiled_libraries import COMPILED, wanted_mode
from draftwell.serving.artifacts.pair_files import (
    PairFiles,
    combine_fingerprint,
    is_artifact,
    model_settings_digest,
    models_root,
    tokenizer_digest,
)
from draftwell.serving.bundle.bundle import MANIFEST, FileRecord, Manifest, ModelRecord, open_bundle
from draftwell.serving.bundle.card import without_card
from draftwell.serving.bundle.manifest import read_bundle_manifest
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, put_folder, sha256_file, write_link
from draftwell.serving.number_format import FORMATS
from draftwell.serving.runtime.models.native.library import own_library, verify


def build_bundle(
    store: Store,
    pair_spec: PairSpec,
    files: PairFiles,
    *,
    alias: str = "champion",
    device: str = "cpu",
    out: Path = Path("dist"),
    ungated_reason: str | None = None,
    with_weights: bool = False,
) -> Path:
    """Build `out/<pair>/<version>-<device>/` from a release; `out/<pair>/current` leads to it.

    Beside another bundle of that release (of another runtime, say) the new one is called
    `<version>-<device>.2`, and so on: a server may still be reading the old one. The same bundle is
    not written twice. One that the gate judged is deployed as it is
    (`draftwell.registry.bundles.judged`), with the card of the release's tuning if there is one. A
    champion named by hand in MLflow's UI needs the same gate record as one that was promoted.

    Args:
        files: the pair's models on this machine; they must be those of the release.
        alias: alias (or number) of the release.
        ungated_reason: deploy although no gate record allows it; the manifest keeps the reason.
        with_weights: copy the models into the bundle.
    Raises:
        DraftwellError: the release is missing or ungated, or the models are others; nothing was
            changed. Or it was rolled back, or another became champion in its place, while it was
            built, or it could not be signed with the key that is named: the bundle is kept,
            `current` still points to the old one.
    """
    release = find_release(store, pair_spec.name, device, alias)
    crowned = alias == "champion" or is_champion(store, release)
    record = gate_record(release)
    ungated, withdrawn = check_deployable(store, release, ungated_reason)
    why = ungated or withdrawn
    home = out / pair_spec.name
    with building(home) as place:
        if not why and not with_weights and take_judged(release, place):
            set_rights(place)
            _link_models(*_models_of(place, pair_spec, files))
        else:
            as_greedy = bool(record and not ungated and record.sampled_as_greedy)
            reason = ungated_reason if why else None
            _write_bundle(store, release, pair_spec, files, place, reason, with_weights, as_greedy)
        add_card(place, kept_card(store, release))
        open_bundle(place).files(models_root())
        final = _settle(place, home, release)
        sign(final)
        _link(store, release, final, crowned=crowned, withdrawn=withdrawn)
    if alias == "champion":
        # the bundle is complete; a registry that only lets us read keeps its aliases
        with contextlib.suppress(DraftwellError):
            adopt(store, release.pair, device)
    return final


def check_deployable(
    store: Store, release: ReleaseVersion, ungated_reason: str | None = None
) -> tuple[str | None, str | None]:
    """What is wrong with a release's gate record, and why it was withdrawn, if anything.

    Raises:
        DraftwellError: anything is, and there is no reason to deploy it all the same
            (`not_deployable`).
    """
    ungated, withdrawn = deployment_objection(store, release), withdrawal(store, release)
    if (why := ungated or withdrawn) and not ungated_reason:
        raise _not_deployable(release.pair, release, why, gated=ungated is None)
    return ungated, withdrawn


def _not_deployable(pair: str, release: ReleaseVersion, why: str, *, gated: bool) -> DraftwellError:
    """The error of a release that no gate passed, or that was withdrawn since."""
    fix = (
        f"release promote --pair {pair} {release_settings(release.device)} "
        f"--release {release.version} --set reason=…"
        if gated
        else f"gate --pair {pair}"
    )
    return DraftwellError(
        f"{release.name} is not deployed, {why}: run `draftwell {fix}`, or say why not with "
        "--set ungated=REASON",
        code="not_deployable",
    )


def build_to_judge(
    store: Store,
    release: ReleaseVersion,
    pair_spec: PairSpec,
    files: PairFiles,
    place: Path,
    *,
    sampled_as_greedy: bool = False,
) -> Path:
    """Build the bundle of a release that has no verdict yet, exactly as it is deployed once it
    passed; returns its folder in `place`.

    Args:
        sampled_as_greedy: what the verdict will say of it.
    """
    bundle = place / "bundle"
    bundle.mkdir()
    _write_bundle(store, release, pair_spec, files, bundle, sampled_as_greedy=sampled_as_greedy)
    open_bundle(bundle).files(models_root())
    return bundle


def relink(store: Store, release: ReleaseVersion, out: Path) -> Path | None:
    """Let `current` lead to a bundle of the champion that was built earlier; None where there is
    none, or only damaged ones.

    The one that the gate judged comes first, then others that were deployed with the gate's
    consent, the newest first. It waits for no build, so that a rollback takes seconds.

    Raises:
        DraftwellError: the release is not the champion any more, or was rolled back; `current`
            stays.
    """
    record, withdrawn = gate_record(release), withdrawal(store, release)
    found: list[tuple[bool, bool, int, Path]] = []
    for build, bundle in _bundles_of(out / release.pair, release):
        with contextlib.suppress(DraftwellError):  # a damaged one
            manifest = open_bundle(bundle).manifest
            if manifest.release_digest == release.published.digest:
                judged = record is not None and without_card(manifest) == record.bundle_digest
                found.append((judged, manifest.gated, build, bundle))
    if not found:
        return None
    best = max(found)[-1]
    _link(store, release, best, crowned=True, withdrawn=withdrawn)
    return best


def _link(
    store: Store, release: ReleaseVersion, bundle: Path, *, crowned: bool, withdrawn: str | None
) -> None:
    """Let `current` lead to a release's bundle, unless the release was taken back since it was
    looked up.

    A build takes minutes, and whoever rolls back meanwhile has the last word. A rollback changes
    the registry first and links then. So with the lock, which is held for the question and the link
    alone, it is seen here, or it links after this.

    Args:
        crowned: whether the release was the champion when it was looked up; `withdrawn`: its
            `withdrawal` then.
    Raises:
        DraftwellError: it was rolled back, or is not the champion any more; `current` stays.
    """
    with file_lock(bundle.parent.parent):
        why = withdrawal(store, release)
        if why == withdrawn:
            lost = crowned and not is_champion(store, release)
            why = "it is not the champion any more" if lost else None
        if why:
            raise DraftwellError(
                f"{release.name}: {why}; the bundle was built at {bundle}, but `current` still "
                "points to the old one: run `draftwell deploy --pair "
                f"{release.pair} --device {release.device}` if the present champion has no bundle",
                code="current_not_moved",
            )
        link_current(bundle.parent, bundle, release.device)


def _bundles_of(home: Path, release: ReleaseVersion) -> list[tuple[int, Path]]:
    """A release's bundles with their numbers, the oldest first."""
    return [
        (one.build, one.path)
        for one in standing(home, release.device)
        if one.release == release.version
    ]


def _write_bundle(
    store: Store,
    release: ReleaseVersion,
    spec: PairSpec,
    files: PairFiles,
    place: Path,
    ungated_reason: str | None = None,
    with_weights: bool = False,
    sampled_as_greedy: bool = False,
) -> None:
    """Write a complete bundle into an empty folder."""
    pinned = _download_pins(store, release, place)
    files, records = _models_of(place, spec, files)
    dtype = _dtype(release, files, records)
    origins = _copy_models(place, files, records, with_weights)
    _link_models(files, records)
    _put_libraries(place, release)
    profile, wheel = place / "artifacts" / "hardware_profile", runtime_wheel()
    manifest = Manifest(
        pair=spec.name,
        device=release.device,
        dtype=dtype,
        chat=spec.chat,
        fingerprint=release.fingerprint,
        device_class=_made(profile).get("device_class"),
        release_version=release.version,
        release_digest=release.published.digest,
        gated=ungated_reason is None,
        ungated_reason=ungated_reason,
        sampled_as_greedy=sampled_as_greedy,
        versions=release.pins,
        runtime=wheel.version,
        models=dict(records),
        origins=origins,
        runs={"release": release.published.run_id} | {k: p.run_id for k, p in pinned.items()},
        files={},
    )
    lock = _lock(place, release, files, wheel)
    (place / wheel.name).write_bytes(wheel.data)
    texts = {
        **bundle_texts(manifest, wheel.name, lock),
        requirements_name(release.device): lock.text,
        SBOM: bill_of_materials(manifest, lock, wheel, spec.licence),
    }
    for name, text in texts.items():
        (place / name).write_text(text)
    listed = {
        path.relative_to(place).as_posix(): FileRecord(
            sha256=sha256_file(path), size=path.stat().st_size
        )
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }
    beside = _settings_digests(files, records)
    manifest = manifest.model_copy(update={"files": listed, "settings_sha256": beside})
    manifest = manifest.model_copy(update={"digest": manifest.computed_digest()})
    (place / MANIFEST).write_text(manifest.to_json())
    set_rights(place)


def _lock(place: Path, release: ReleaseVersion, files: PairFiles, wheel: Wheel) -> Lock:
    """A bundle's requirements, with what its models' weights need."""
    # the libraries that the release's choice was measured with
    measured = _made(place / "artifacts" / "decoding_config").get("library_versions", {})
    return locked(
        release.device,
        measured=measured,
        wheel=(wheel.name, wheel.data),
        further=sorted(set(chain(*map(packages_of, files.roles().values())))),
    )


def add_card(place: Path, card: Mapping[str, bytes]) -> None:
    """Add the card of a release's tuning to its finished bundle; nothing without one."""
    if not card:
        return
    manifest = read_bundle_manifest(place)
    listed = dict(manifest.files)
    for name, data in card.items():
        (place / name).write_bytes(data)
        listed[name] = FileRecord(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    manifest = manifest.model_copy(update={"files": dict(sorted(listed.items()))})
    manifest = manifest.model_copy(update={"digest": manifest.computed_digest()})
    (place / MANIFEST).write_text(manifest.to_json())
    set_rights(place)


def _settings_digests(files: PairFiles, records: dict[str, ModelRecord]) -> dict[str, str]:
    """Of models that the bundle leaves out."""
    return {
        role: model_settings_digest(folder)
        for role, folder in files.roles().items()
        if records[role].source != "bundled"
    }


def _made(artifact: Path) -> dict[str, Any]:
    """The provenance of an artifact; empty where there is none."""
    return dict(read_manifest(artifact)["provenance"]) if artifact.is_dir() else {}


def _download_pins(store: Store, release: ReleaseVersion, place: Path) -> dict[str, Published]:
    pinned = {kind: pinned_version(store, release, kind) for kind in release.pins}
    for kind, published in pinned.items():
        store.download(published, place / "artifacts" / kind)
    return pinned


def _models_of(
    place: Path, spec: PairSpec, files: PairFiles
) -> tuple[PairFiles, dict[str, ModelRecord]]:
    """A bundle's models and their records; a draft that the release pins is the bundle's own."""
    draft = place / "artifacts" / "distilled_draft"
    if draft.is_dir():
        files = replace(files, draft=draft)
    return files, model_records(spec, files)


def _dtype(release: ReleaseVersion, files: PairFiles, records: dict[str, ModelRecord]) -> str:
    """The dtype under which these models have the release's fingerprint."""
    weights = {role: records[role].weights_sha256 for role in files.roles()}
    tokenizer = tokenizer_digest(files.target)
    for dtype in FORMATS:
        if combine_fingerprint(weights, tokenizer, dtype) == release.fingerprint:
            return dtype
    raise DraftwellError(
        f"{release.name} was made for other models (fingerprint {release.fingerprint[:12]}) than "
        f"those of pair {release.pair} here: fetch the weights it names, or calibrate and "
        "release it again",
        code="other_weights",
    )


def _copy_models(
    place: Path, files: PairFiles, records: dict[str, ModelRecord], with_weights: bool
) -> dict[str, str]:
    """Copy the models that the bundle carries and correct their records; returns where copied
    weights come from."""
    origins: dict[str, str] = {}
    for role, folder in files.roles().items():
        if folder.is_relative_to(place) or not (with_weights or is_artifact(folder)):
            continue
        copy_model(folder, place / "models" / role)
        if not is_artifact(folder):  # an artifact records its own origin
            origins[role] = records[role].source
        records[role] = records[role].model_copy(
            update={"source": "bundled", "folder": f"models/{role}"}
        )
    return origins


def _link_models(files: PairFiles, records: dict[str, ModelRecord]) -> None:
    """Let the models folder lead to the models that the bundle leaves out."""
    for role, folder in files.roles().items():
        kept = models_root() / records[role].folder
        if records[role].source != "bundled" and not kept.exists():
            write_link(kept, folder.absolute())


def _put_libraries(place: Path, release: ReleaseVersion) -> None:
    """Copy the compiled layers of this machine, unless others may have written them."""
    if release.device != "cpu" or wanted_mode() == "off":
        return
    if (library := own_library()) is not None:
        verify(library)
        kept = place / COMPILED / library.parent.name / library.name
        kept.parent.mkdir(parents=True)
        shutil.copyfile(library, kept)


def _settle(place: Path, home: Path, release: ReleaseVersion) -> Path:
    """Rename the built folder to the place after the last, unless the same bundle is complete at an
    earlier one; returns which."""
    made, earlier = (place / MANIFEST).read_bytes(), _bundles_of(home, release)
    for _, bundle in earlier:
        with contextlib.suppress(DraftwellError, OSError):
            if (bundle / MANIFEST).read_bytes() == made:
                open_bundle(bundle)
                return bundle
    number = f".{earlier[-1][0] + 1}" if earlier else ""
    final = home / f"{release.version}-{release.device}{number}"
    put_folder(place, final)
    return final
