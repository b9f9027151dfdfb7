"""Bundles: what `make deploy` writes and the server loads. Everything is checked before anything is
loaded.

A bundle is a folder with `manifest.json`, `artifacts/<kind>/` and, where asked for,
`models/<role>/`; next to them is what installs and starts the runtime (a wheel, requirements,
`Dockerfile`, `serve.sh`), which the runtime itself never runs. The manifest names every file with
size and sha256 and carries a digest over itself. Weights that are not bundled are named by a folder
under `$DRAFTWELL_MODELS` and by their digest. Invariant: an open `Bundle` has passed every check.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from draftwell.serving.artifacts.base import ArtifactError, check_schema, digest_of, read_manifest
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.artifacts.pair_files import (
    HASHING_THREADS,
    SIDECAR,
    ModelRole,
    PairFiles,
    combine_digests,
    combine_fingerprint,
    is_artifact,
    model_digest,
    model_settings_digest,
    tokenizer_digest,
)
from draftwell.serving.bundle.manifest import (
    MANIFEST,
    BundleError,
    FileRecord,
    Manifest,
    ModelRecord,
    manifest_bytes,
    read_bundle_manifest,
)
from draftwell.serving.bundle.signature import SIGNATURE
from draftwell.serving.files import is_left_over, sha256_file

if TYPE_CHECKING:
    from draftwell.serving.artifacts.base import Artifact

__all__ = [
    "MANIFEST",
    "Bundle",
    "BundleError",
    "FileRecord",
    "Manifest",
    "ModelRecord",
    "check_signed_files",
    "open_bundle",
    "refuse_inside",
]


@dataclass(frozen=True)
class Bundle:
    """A checked bundle."""

    path: Path
    manifest: Manifest

    def artifacts(self) -> dict[str, Artifact]:
        """kind → artifact, each bound to the bundle's fingerprint."""
        found = {}
        for name in self.manifest.versions:
            kind = KINDS[name]
            expected = self.manifest.fingerprint if kind.fingerprinted else None
            found[name] = kind.load_class().load(
                self.path / "artifacts" / name, fingerprint=expected
            )
        return found

    def files(self, models_root: Path, *, in_full: bool = False) -> PairFiles:
        """The pair's model folders, from the bundle or from `models_root`, with digests and
        fingerprint checked.

        Args:
            in_full: whether all weights are read for it, and what lies next to them is held to the
                manifest; otherwise digests that are kept beside weights are believed
                (`pair_files.weights_digest`).
        """
        folders = {
            role: self._folder(role, record, models_root, in_full)
            for role, record in self.manifest.models.items()
        }
        if in_full:
            self._check_settings(folders)
        weights = {role: record.weights_sha256 for role, record in self.manifest.models.items()}
        found = combine_fingerprint(
            weights, tokenizer_digest(folders["target"]), self.manifest.dtype
        )
        if found != self.manifest.fingerprint:
            raise BundleError(
                f"the bundle {self.path} was made for fingerprint "
                f"{self.manifest.fingerprint[:12]} of "
                f"pair {self.manifest.pair}, the models here give {found[:12]}: fetch that "
                "pair's models "
                "or deploy again",
                code="another_pair",
            )
        return PairFiles(
            self.manifest.pair, folders["target"], folders.get("draft"), folders.get("qualifier")
        )

    def _folder(
        self, role: ModelRole, record: ModelRecord, models_root: Path, in_full: bool
    ) -> Path:
        bundled = record.source == "bundled"
        folder = (self.path if bundled else models_root) / record.folder
        name = f"the {role} of pair {self.manifest.pair}"
        if not folder.is_dir():
            raise BundleError(
                f"{name} ({record.source}) is not at {folder}: fetch it there (any "
                "`draftwell generate "
                f"--pair {self.manifest.pair}` does), set DRAFTWELL_MODELS, or deploy "
                "with --set with_weights=true",
                code="missing_models",
            )
        found = (
            self._bundled_digest(record.folder)
            if bundled
            else model_digest(folder, in_full=in_full)
        )
        if found != record.weights_sha256:
            raise BundleError(
                f"{name} at {folder} has weights {found[:12]}, the bundle needs "
                f"{record.weights_sha256[:12]}: fetch the pair again or deploy again",
                code="other_weights",
            )
        return folder

    def _check_settings(self, folders: Mapping[ModelRole, Path]) -> None:
        for role, digest in self.manifest.settings_sha256.items():
            if model_settings_digest(folders[role]) != digest:
                raise BundleError(
                    f"next to the weights of the {role} of pair {self.manifest.pair} at "
                    f"{folders[role]} are other files (configuration, tokenizer, chat template) "
                    "than where the bundle was built: fetch the pair again, or deploy "
                    "with --set with_weights=true",
                    code="other_settings",
                )

    def _bundled_digest(self, folder: str) -> str:
        """Digest of a bundled model from the file digests that `open_bundle` has checked."""
        if is_artifact(self.path / folder):
            return digest_of(self.path / folder)
        place = PurePosixPath(folder)
        return combine_digests(
            {
                PurePosixPath(name).name: record.sha256
                for name, record in self.manifest.files.items()
                if PurePosixPath(name).parent == place and name.endswith(".safetensors")
            }
        )


def open_bundle(path: Path, *, verify: Callable[[Path, bytes], None] | None = None) -> Bundle:
    """Check a bundle and open it.

    Args:
        path: the bundle's folder, or a link to it (`dist/<pair>/current`), which is followed once.
        verify: is given the bundle's folder and what its manifest holds before anything of it is
            parsed, and raises a `BundleError` where it is not to be.
    Raises:
        BundleError: it is missing, damaged, holds links or unlisted files, mixes pairs, or is of
            another version; the file is named. No artifact and no weight has been loaded then.
    """
    path = path.resolve()
    if not path.is_dir():
        raise BundleError(
            f"there is no bundle at {path}: build one with `draftwell deploy`", code="no_bundle"
        )
    written = manifest_bytes(path)
    if verify is not None:
        verify(path, written)
    manifest = read_bundle_manifest(path, written)
    weights = [record.folder for record in manifest.models.values()]
    _check_tree(path, manifest.files, weights)
    _check_files(path, manifest.files)
    for kind in manifest.versions:
        _check_artifact(path, kind, manifest)
    return Bundle(path, manifest)


def check_signed_files(
    path: Path, verify: Callable[[Path, bytes], None], own_files: Collection[str] = ()
) -> Path:
    """Refuse a bundle of any engine that is not, to its last file, what was signed.

    Args:
        path: the bundle's folder, or a link to it.
        verify: as for `open_bundle`.
        own_files: what whoever installed the bundle may have put there.
    Returns:
        the folder that was checked.
    Raises:
        BundleError: as `open_bundle`.
    """
    path = path.resolve()
    written = manifest_bytes(path)
    verify(path, written)
    files = {
        name: FileRecord.model_validate(record)
        for name, record in json.loads(written).get("files", {}).items()
    }
    _check_tree(path, {*files, *own_files})
    _check_files(path, files)
    return path


def refuse_inside(path: Path, written: Mapping[str, Path]) -> None:
    """Refuse to write into a bundle: the next start would find a file there that is not the
    bundle's own.

    Args:
        path: the bundle's folder, or a link to it; what is no bundle is left to `open_bundle`.
        written: what names a folder that will be written to (a variable or an option) → the folder.
    Raises:
        BundleError: one of them is the bundle, or lies inside.
    """
    bundle = path.resolve()
    if not (bundle / MANIFEST).is_file():
        return
    for name, folder in written.items():
        if folder.resolve().is_relative_to(bundle):
            raise BundleError(
                f"{name} would be {folder}, inside the bundle {bundle}, where nothing may "
                "be written: "
                f"set {name} to another folder",
                code="folder_inside_bundle",
            )


def _check_tree(path: Path, files: Collection[str], weights: Collection[str] = ()) -> None:
    """Refuse links, and files that are not listed; the manifest, its signature, and digests that
    the runtime keeps next to weights, are neither, nor is what another server, or one that was
    killed, has written of them."""
    models = {path / folder for folder in weights}
    listed = {*files, MANIFEST, SIGNATURE, *(f"{folder}/{SIDECAR}" for folder in weights)}
    for file in sorted(_entries(path)):
        if file.is_symlink():
            raise BundleError(
                f"{file} is a link, and bundles must not contain links: remove it or deploy again",
                code="link_in_bundle",
            )
        if file.parent in models and is_left_over(file.name, SIDECAR):
            continue
        if not file.is_dir() and file.relative_to(path).as_posix() not in listed:
            raise BundleError(
                f"{file} is not part of the bundle: remove it or deploy again", code="unlisted_file"
            )


def _entries(path: Path) -> Iterator[Path]:
    """All that lies below a folder, links not followed."""
    for folder, folders, files in os.walk(path):
        yield from (Path(folder) / name for name in (*folders, *files))


def _check_files(path: Path, files: Mapping[str, FileRecord]) -> None:
    # the first wrong file in order is named
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        for _ in pool.map(lambda item: _check_file(path, *item), files.items()):
            pass


def _check_file(path: Path, name: str, record: FileRecord) -> None:
    file = path / name
    if not file.is_file():
        raise BundleError(f"the bundle lacks its file {file}: deploy again", code="missing_file")
    if (size := file.stat().st_size) != record.size:
        raise BundleError(
            (
                f"{file} has {size} bytes, not {record.size}: it was truncated or changed, "
                "deploy again"
            ),
            code="changed_file",
        )
    if sha256_file(file) != record.sha256:
        raise BundleError(
            f"{file} was changed since it was made (sha256 differs): deploy again",
            code="changed_file",
        )


def _check_artifact(path: Path, kind: str, manifest: Manifest) -> None:
    folder = path / "artifacts" / kind
    if kind not in KINDS:
        raise BundleError(
            f"{path} holds a {kind}, which this runtime does not know: upgrade draftwell, or "
            "install the plug-in that brings it",
            code="newer_bundle",
        )
    if f"artifacts/{kind}/artifact.json" not in manifest.files:
        raise BundleError(
            f"the bundle {path} lacks its artifact {kind}: deploy again", code="missing_file"
        )
    try:
        found = read_manifest(folder)
    except ArtifactError as error:
        raise BundleError(
            f"{folder} holds no artifact: deploy again", code="wrong_artifact"
        ) from error
    if found["kind"] != kind:
        raise BundleError(
            f"{folder} holds a {found['kind']}, not a {kind}: deploy again", code="wrong_artifact"
        )
    try:
        check_schema(folder, found, KINDS[kind].schema_version)
    except ArtifactError as error:
        raise BundleError(f"{error}, or deploy again", code=error.code) from error
    mark = found["provenance"]["fingerprint"]
    if KINDS[kind].fingerprinted and mark != manifest.fingerprint:
        raise BundleError(
            f"the {kind} in {folder} has fingerprint {mark[:12]}, the bundle "
            f"{manifest.fingerprint[:12]}: it belongs to another pair, deploy again",
            code="another_pair",
        )
