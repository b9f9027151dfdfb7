"""Building a bundle from a release: `make deploy`.

Data files only, every digest checked on the way. The folder is built beside its place and renamed, then the link
`current` is moved: a server that watches it sees the old bundle or the new one. Two builds of one release are
byte-identical: nothing in them tells time, machine or user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from registry.bundle_text import readme, serve_script
from registry.pairs.catalogue import PairSpec
from registry.pairs.fetching import link
from registry.pairs.records import model_records
from registry.releases import ReleaseVersion, find_release, gate_record, objection
from registry.store import Published, Store
from serving.runtime.artifacts.base import read_manifest, sha256_file
from serving.runtime.bundle import MANIFEST, FileRecord, Manifest, ModelRecord, open_bundle
from serving.runtime.pair_files import (
    DTYPES,
    PairFiles,
    combine_fingerprint,
    is_artifact,
    models_root,
    tokenizer_digest,
)
from serving.runtime.types import DraftwellError

MODEL_FILES = (".json", ".safetensors", ".model", ".txt", ".jinja")


def build_bundle(store: Store, pair_spec: PairSpec, files: PairFiles, *, alias: str = "champion", device: str = "cpu",
                 out: Path = Path("dist"), ungated_reason: str | None = None, with_weights: bool = False) -> Path:
    """Build `out/<pair>/<version>-<device>/` from a release and let `out/<pair>/current` lead to it.

    Args:
        files: the pair's models on this machine; they must be those of the release.
        alias: alias (or number) of the release.
        ungated_reason: deploy although no passed gate record stands; the manifest keeps the reason.
        with_weights: copy the models into the bundle.
    Raises:
        DraftwellError: the release is missing or ungated, or the models are others; nothing was changed.
    """
    release = find_release(store, pair_spec.name, device, alias)
    why = objection(release, gate_record(release))
    if why and not ungated_reason:
        raise DraftwellError(f"{release.name} is not deployed, {why}: run `draftwell gate --pair {pair_spec.name}`, "
                             "or say why not with --ungated REASON")
    home = out / pair_spec.name
    home.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=home, prefix=".build."))
    try:
        pinned = _download_pins(store, release, place)
        manifest = _fill(place, release, pinned, pair_spec, files, ungated_reason if why else None, with_weights)
        (place / MANIFEST).write_text(manifest.to_json())
        open_bundle(place).files(models_root())
        final = home / f"{release.version}-{device}"
        _settle(place, final)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    link_current(home, final)
    return final


def _download_pins(store: Store, release: ReleaseVersion, place: Path) -> dict[str, Published]:
    pinned = {kind: store.resolve(kind, release.pair, version) for kind, version in release.pins.items()}
    for kind, published in pinned.items():
        if published.digest != release.contents.pins[kind].digest:
            raise DraftwellError(f"{published.name} version {published.version} is not what {release.name} pins "
                                 "(digest differs): create the release again")
        store.download(published, place / "artifacts" / kind)
    return pinned


def _fill(place: Path, release: ReleaseVersion, pinned: dict[str, Published], spec: PairSpec, files: PairFiles,
          ungated_reason: str | None, with_weights: bool) -> Manifest:
    """Write everything but the manifest, and return that."""
    if "distilled_draft" in pinned:
        files = replace(files, draft=place / "artifacts" / "distilled_draft")
    records = model_records(spec, files)
    dtype = _dtype(release, files, records)
    for role, folder in files.roles().items():
        if is_artifact(folder) and role == "draft" and "distilled_draft" in pinned:
            continue
        if with_weights or is_artifact(folder):
            _copy_model(folder, place / "models" / role)
            records[role] = records[role].model_copy(update={"source": "bundled", "folder": f"models/{role}"})
        elif not (kept := models_root() / records[role].folder).exists():
            link(kept, folder)
    profile = place / "artifacts" / "hardware_profile"
    manifest = Manifest(
        pair=spec.name, device=release.device, dtype=dtype, chat=spec.chat, fingerprint=release.fingerprint,
        device_class=read_manifest(profile)["provenance"]["device_class"] if profile.is_dir() else None,
        release_version=release.version, release_digest=release.published.digest,
        gated=ungated_reason is None, ungated_reason=ungated_reason, versions=release.pins, models=dict(records),
        runs={"release": release.published.run_id, **{kind: p.run_id for kind, p in pinned.items()}}, files={})
    (place / "README.md").write_text(readme(manifest))
    (place / "serve.sh").write_text(serve_script())
    (place / "serve.sh").chmod(0o755)
    listed = {path.relative_to(place).as_posix(): FileRecord(sha256=sha256_file(path), size=path.stat().st_size)
              for path in sorted(place.rglob("*")) if path.is_file()}
    manifest = manifest.model_copy(update={"files": listed})
    return manifest.model_copy(update={"digest": manifest.computed_digest()})


def _dtype(release: ReleaseVersion, files: PairFiles, records: dict[str, ModelRecord]) -> str:
    """The dtype under which these models have the release's fingerprint."""
    weights = {role: records[role].weights_sha256 for role in files.roles()}
    tokenizer = tokenizer_digest(files.target)
    for dtype in DTYPES:
        if combine_fingerprint(weights, tokenizer, dtype) == release.fingerprint:
            return dtype
    raise DraftwellError(f"{release.name} was made for other models (fingerprint {release.fingerprint[:12]}) than those "
                         f"of pair {release.pair} here: fetch the weights it names, or calibrate and release it again")


def _copy_model(folder: Path, into: Path) -> None:
    into.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in MODEL_FILES and not path.name.startswith("."):
            shutil.copyfile(path, into / path.name)


def _settle(place: Path, final: Path) -> None:
    """Rename the built folder to its place, unless the same bundle lies there already."""
    place.chmod(0o755)
    if final.is_dir():
        if (final / MANIFEST).is_file() and (final / MANIFEST).read_bytes() == (place / MANIFEST).read_bytes():
            with contextlib.suppress(DraftwellError):
                open_bundle(final)
                return
        old = Path(tempfile.mkdtemp(dir=final.parent, prefix=".old."))
        os.replace(final, old / "bundle")
        os.replace(place, final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(place, final)


def link_current(home: Path, bundle: Path) -> None:
    """Let `home/current` lead to a bundle beside it, atomically."""
    new = home / f".current.{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(bundle.name, target_is_directory=True)
    os.replace(new, home / "current")
