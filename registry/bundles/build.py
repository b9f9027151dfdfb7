"""Building a bundle from a release: `make deploy`.

Data files and the runtime's own wheel, every digest checked on the way. The folder is built next to
its place and renamed, then the link `current` is moved: a server that watches it sees the old
bundle or the new one, and an existing bundle is never changed or removed. Two builds of one release
with one runtime are byte-identical on one machine: nothing in them depends on time, machine or user
but the compiled layers (`compiled/`), which were made there once, name the folders they were
compiled in, and are left unused by other processors.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from draftwell.registry.bundles.judged import take_judged
from draftwell.registry.bundles.places import (
    NAME,
    UNFINISHED,
    alone,
    copy_model,
    link_current,
    set_rights,
)
from draftwell.registry.bundles.requirements import Lock, locked, requirements_name
from draftwell.registry.bundles.sbom import SBOM, bill_of_materials
from draftwell.registry.bundles.signing import sign
from draftwell.registry.bundles.text import dockerfile, readme, serve_script
from draftwell.registry.bundles.wheel import Wheel, runtime_wheel
from draftwell.registry.pairs.catalogue import PairSpec
from draftwell.registry.pairs.fetching import link
from draftwell.registry.pairs.records import model_records
from draftwell.registry.promotion import adopt, withdrawal
from draftwell.registry.releases import (
    ReleaseVersion,
    find_release,
    gate_record,
    is_champion,
    objection,
)
from draftwell.registry.store import Published, Store
from draftwell.serving.artifacts.base import read_manifest
from draftwell.serving.artifacts.compiled_libraries import COMPILED, used_by, wanted_mode
from draftwell.serving.artifacts.pair_files import (
    PairFiles,
    combine_fingerprint,
    is_artifact,
    models_root,
    tokenizer_digest,
)
from draftwell.serving.bundle.bundle import MANIFEST, FileRecord, Manifest, ModelRecord, open_bundle
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, sha256_file
from draftwell.serving.number_format import FORMATS


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

    Where another bundle of that release exists (built with another runtime, say), the new one is
    put next to it as `<version>-<device>.2`, and so on: a server may still be reading the old one.
    The same bundle is not written twice.

    A bundle that the gate judged is deployed as it is (`draftwell.registry.bundles.judged`). A
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
    ungated = objection(release, gate_record(release))
    if (why := ungated or withdrawal(release)) and not ungated_reason:
        raise _not_deployable(pair_spec.name, release, why, gated=not ungated)
    home = out / pair_spec.name
    home.mkdir(parents=True, exist_ok=True)
    with alone(home):
        place = Path(tempfile.mkdtemp(dir=home, prefix=UNFINISHED))
        try:
            if not why and not with_weights and take_judged(release, place):
                set_rights(place)
                _link_models(pair_spec, files, place)
            else:
                gated = None if ungated else gate_record(release)
                as_greedy = gated is not None and gated.sampled_as_greedy
                reason = ungated_reason if why else None
                _make(store, release, pair_spec, files, place, reason, with_weights, as_greedy)
            open_bundle(place).files(models_root())
            final = _settle(place, home, release)
            sign(final)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        _link(store, release, final, crowned=crowned)
    if alias == "champion":
        # the bundle is complete; a registry that only lets us read keeps its aliases
        with contextlib.suppress(DraftwellError):
            adopt(store, release)
    return final


def _not_deployable(pair: str, release: ReleaseVersion, why: str, *, gated: bool) -> DraftwellError:
    """That a release is not deployed, and what would help."""
    fix = (
        f"promote --pair {pair} --release {release.version} --reason …"
        if gated
        else f"gate --pair {pair}"
    )
    return DraftwellError(
        f"{release.name} is not deployed, {why}: run `draftwell {fix}`, or say why not with "
        "--ungated REASON",
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
    _make(
        store,
        release,
        pair_spec,
        files,
        bundle,
        None,
        with_weights=False,
        sampled_as_greedy=sampled_as_greedy,
    )
    open_bundle(bundle).files(models_root())
    return bundle


def _make(
    store: Store,
    release: ReleaseVersion,
    pair_spec: PairSpec,
    files: PairFiles,
    place: Path,
    ungated_reason: str | None,
    with_weights: bool,
    sampled_as_greedy: bool,
) -> None:
    """Write a complete bundle into an empty folder."""
    pinned = _download_pins(store, release, place)
    manifest = _fill(
        place, release, pinned, pair_spec, files, ungated_reason, with_weights, sampled_as_greedy
    )
    (place / MANIFEST).write_text(manifest.to_json())
    set_rights(place)


def _link_models(pair_spec: PairSpec, files: PairFiles, bundle: Path) -> None:
    """Let the models folder lead to the models that a finished bundle leaves out, as `_fill`
    does."""
    if (bundle / "artifacts" / "distilled_draft").is_dir():
        files = replace(files, draft=bundle / "artifacts" / "distilled_draft")
    records = model_records(pair_spec, files)
    for role, folder in files.roles().items():
        if not is_artifact(folder) and not (kept := models_root() / records[role].folder).exists():
            link(kept, folder)


def bundle_bytes(bundle: Path) -> int:
    """Size of a bundle's files, those of its manifest included."""
    return sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())


def relink(store: Store, release: ReleaseVersion, out: Path) -> Path | None:
    """Let `current` lead to a bundle of the champion that was built earlier; None where there is
    none, or only damaged ones.

    The one that the gate judged comes first, then others that were deployed with the gate's
    consent, the newest first. It waits for no build, so that a rollback takes seconds.

    Raises:
        DraftwellError: the release is not the champion any more, or was rolled back; `current`
            stays.
    """
    record = gate_record(release)
    found: list[tuple[tuple[bool, bool], Path]] = []
    for _, bundle in _standing(out / release.pair, release):
        with contextlib.suppress(DraftwellError):  # a damaged one
            manifest = open_bundle(bundle).manifest
            if manifest.release_digest == release.published.digest:
                judged = record is not None and manifest.digest == record.bundle_digest
                found.append(((judged, manifest.gated), bundle))
    if not found:
        return None
    best = max(found, key=lambda rated: rated[0] + (found.index(rated),))[1]
    _link(store, release, best, crowned=True)
    return best


def _link(store: Store, release: ReleaseVersion, bundle: Path, *, crowned: bool) -> None:
    """Let `current` lead to a release's bundle, unless the release was taken back since it was
    looked up.

    A build takes minutes, and whoever rolls back meanwhile has the last word. A rollback changes
    the registry first and links then. So with the lock, which is held for the question and the link
    alone, it is seen here, or it links after this.

    Args:
        crowned: whether the release was the champion when it was looked up.
    Raises:
        DraftwellError: it was rolled back, or is not the champion any more; `current` stays.
    """
    with file_lock(bundle.parent.parent):
        now = replace(
            release,
            published=store.resolve("release", f"{release.pair}.{release.device}", release.version),
        )
        why = withdrawal(now)
        if why == withdrawal(release):
            why = (
                "it is not the champion any more"
                if crowned and not is_champion(store, release)
                else None
            )
        if why:
            raise DraftwellError(
                f"{release.name}: {why}; the bundle was built at {bundle}, but `current` "
                "still points to the old one: "
                f"run `draftwell deploy --pair {release.pair} --device {release.device}` "
                "if the present champion has no "
                "bundle",
                code="current_not_moved",
            )
        link_current(bundle.parent, bundle)


def _standing(home: Path, release: ReleaseVersion) -> list[tuple[int, Path]]:
    """A release's bundles with their numbers, the oldest first; older ones may have been removed
    from among them."""
    found = (
        (NAME.fullmatch(path.name), path) for path in (home.iterdir() if home.is_dir() else ())
    )
    return sorted(
        (int(name[3] or 1), path)
        for name, path in found
        if name and (int(name[1]), name[2]) == (release.version, release.device)
    )


def _download_pins(store: Store, release: ReleaseVersion, place: Path) -> dict[str, Published]:
    pinned = {
        kind: store.resolve(kind, release.pair, version) for kind, version in release.pins.items()
    }
    for kind, published in pinned.items():
        if published.digest != release.contents.pins[kind].digest:
            raise DraftwellError(
                f"{published.name} version {published.version} is not what {release.name} pins "
                "(digest differs): create the release again",
                code="pinned_artifact_changed",
            )
        store.download(published, place / "artifacts" / kind)
    return pinned


def _fill(
    place: Path,
    release: ReleaseVersion,
    pinned: dict[str, Published],
    spec: PairSpec,
    files: PairFiles,
    ungated_reason: str | None,
    with_weights: bool,
    sampled_as_greedy: bool,
) -> Manifest:
    """Write everything but the manifest, and return that."""
    if "distilled_draft" in pinned:
        files = replace(files, draft=place / "artifacts" / "distilled_draft")
    records = model_records(spec, files)
    dtype = _dtype(release, files, records)
    origins = _put_models(place, files, records, with_weights, "distilled_draft" in pinned)
    _put_libraries(place, release)
    profile, wheel = place / "artifacts" / "hardware_profile", runtime_wheel()
    manifest = Manifest(
        pair=spec.name,
        device=release.device,
        dtype=dtype,
        chat=spec.chat,
        fingerprint=release.fingerprint,
        device_class=read_manifest(profile)["provenance"]["device_class"]
        if profile.is_dir()
        else None,
        release_version=release.version,
        release_digest=release.published.digest,
        gated=ungated_reason is None,
        ungated_reason=ungated_reason,
        sampled_as_greedy=sampled_as_greedy,
        versions=release.pins,
        runtime=wheel.version,
        models=dict(records),
        origins=origins,
        runs={
            "release": release.published.run_id,
            **{kind: p.run_id for kind, p in pinned.items()},
        },
        files={},
    )
    lock = locked(release.device, measured=_tuned_with(place), wheel=(wheel.name, wheel.data))
    _put_start(place, manifest, wheel, lock, spec.licence)
    listed = {
        path.relative_to(place).as_posix(): FileRecord(
            sha256=sha256_file(path), size=path.stat().st_size
        )
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }
    manifest = manifest.model_copy(update={"files": listed})
    return manifest.model_copy(update={"digest": manifest.computed_digest()})


def _put_models(
    place: Path,
    files: PairFiles,
    records: dict[str, ModelRecord],
    with_weights: bool,
    draft_is_pinned: bool,
) -> dict[str, str]:
    """Copy the models that the bundle carries and correct their records, link the others; returns
    where copied weights come from."""
    origins: dict[str, str] = {}
    for role, folder in files.roles().items():
        if is_artifact(folder) and role == "draft" and draft_is_pinned:
            continue
        if with_weights or is_artifact(folder):
            copy_model(folder, place / "models" / role)
            if not is_artifact(folder):  # an artifact records its own origin
                origins[role] = records[role].source
            records[role] = records[role].model_copy(
                update={"source": "bundled", "folder": f"models/{role}"}
            )
        elif not (kept := models_root() / records[role].folder).exists():
            link(kept, folder)
    return origins


def _put_libraries(place: Path, release: ReleaseVersion) -> None:
    """Copy the compiled layers that the release's pair uses on this machine."""
    if release.device != "cpu" or wanted_mode("try") == "off":
        return
    for library in used_by(release.fingerprint):
        kept = place / COMPILED / library.parent.name / library.name
        kept.parent.mkdir(parents=True)
        shutil.copyfile(library, kept)


def _put_start(place: Path, manifest: Manifest, wheel: Wheel, lock: Lock, licence: str) -> None:
    """Write what installs and starts the runtime."""
    (place / wheel.name).write_bytes(wheel.data)
    (place / requirements_name(manifest.device)).write_text(lock.text)
    for name, text in (
        ("README.md", readme),
        ("serve.sh", serve_script),
        ("Dockerfile", dockerfile),
    ):
        (place / name).write_text(text(manifest, wheel.name, lock))
    (place / SBOM).write_text(bill_of_materials(manifest, lock, wheel, licence))


def _tuned_with(place: Path) -> dict[str, str]:
    """Versions of the libraries that the release's choice was measured with."""
    config = place / "artifacts" / "decoding_config"
    return (
        dict(read_manifest(config)["provenance"].get("library_versions", {}))
        if config.is_dir()
        else {}
    )


def _dtype(release: ReleaseVersion, files: PairFiles, records: dict[str, ModelRecord]) -> str:
    """The dtype under which these models have the release's fingerprint."""
    weights = {role: records[role].weights_sha256 for role in files.roles()}
    tokenizer = tokenizer_digest(files.target)
    for dtype in FORMATS:
        if combine_fingerprint(weights, tokenizer, dtype) == release.fingerprint:
            return dtype
    raise DraftwellError(
        f"{release.name} was made for other models (fingerprint "
        f"{release.fingerprint[:12]}) than those "
        f"of pair {release.pair} here: fetch the weights it names, or calibrate and "
        "release it again",
        code="other_weights",
    )


def _settle(place: Path, home: Path, release: ReleaseVersion) -> Path:
    """Rename the built folder to the place after the last, unless the same bundle is complete at an
    earlier one; returns which."""
    made, standing = (place / MANIFEST).read_bytes(), _standing(home, release)
    for _, earlier in standing:
        with contextlib.suppress(DraftwellError, OSError):
            if (earlier / MANIFEST).read_bytes() == made:
                open_bundle(earlier)
                return earlier
    first = home / f"{release.version}-{release.device}"
    final = first.with_name(f"{first.name}.{standing[-1][0] + 1}") if standing else first
    os.rename(place, final)
    return final
