"""Bundles: what `make deploy` writes and the server loads. Everything is checked before anything is loaded.

A bundle is a folder with `manifest.json`, `artifacts/<kind>/` and, with --with-weights, `models/<role>/`. It also holds the files that
install and start the runtime (a wheel, requirements, `Dockerfile`, `serve.sh`), which the runtime itself never runs. The manifest lists
every file with size and sha256, and carries a digest of itself. Weights that are not bundled are identified by a folder under
`$DRAFTWELL_MODELS` and by their digest. Invariant: an open `Bundle` has passed every check.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.artifacts.base import ArtifactError, digest_of, read_manifest
from serving.artifacts.pair_files import (
    SIDECAR,
    ModelRole,
    PairFiles,
    combine_digests,
    combine_fingerprint,
    is_artifact,
    model_digest,
    tokenizer_digest,
)
from serving.errors import DraftwellError
from serving.files import is_left_over, sha256_file

if TYPE_CHECKING:
    from serving.artifacts.base import Artifact

SCHEMA = 2
"""Version 2 added `runtime` and `origins`; version 1 is still read."""
MANIFEST = "manifest.json"
ARTIFACT_SCHEMAS = {"acceptance_head": 1, "acceptance_table": 1, "correction_memory": 1, "decoding_config": 1, "distilled_draft": 1,
                    "hardware_profile": 1, "verifier": 1}
"""kind → newest schema that this runtime reads; equals that of `artifact_classes`, without importing torch."""
HASHING_THREADS = 4
UNBOUND = frozenset({"distilled_draft"})
"""Kinds that are part of a pair's fingerprint and so cannot carry it."""


class BundleError(DraftwellError):
    """A bundle that is missing, damaged, made for another pair, or newer than this runtime."""

    code = "bad_bundle"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Strict):
    """One file of the bundle."""

    sha256: str
    size: int = Field(ge=0, description="bytes")


class ModelRecord(_Strict):
    """Where one model's weights come from."""

    source: str = Field(description="hub:ORG/NAME, package:NAME==VERSION/FILE, local, or bundled")
    revision: str | None = Field(None, description="commit or branch on the hub")
    weights_sha256: str = Field(description="digest of the weights, as `pair_files.model_digest` computes it")
    folder: str = Field(description="folder under $DRAFTWELL_MODELS, or inside the bundle where the source is bundled")


class Manifest(_Strict):
    """The contents of `manifest.json`."""

    schema_version: int = SCHEMA
    digest: str = Field("", description="sha256 over all other fields")
    pair: str
    device: str = Field(pattern="^(cpu|cuda)$", description="cpu or cuda")
    device_class: str | None = Field(None, description="machine class of the hardware profile")
    dtype: str
    chat: bool = Field(False, description="whether prompts go through the chat template")
    fingerprint: str = Field(description="pair fingerprint")
    release_version: int
    release_digest: str
    gated: bool = Field(description="whether the release had passed the gate")
    ungated_reason: str | None = Field(None, description="why it was deployed without a passed gate")
    versions: dict[str, int] = Field(description="kind → registered version")
    runs: dict[str, str] = Field(description="kind → run id in the registry")
    runtime: str | None = Field(None, description="version of the runtime whose wheel is in the bundle")
    models: dict[ModelRole, ModelRecord]
    origins: dict[ModelRole, str] = Field(
        default_factory=dict, description="where the weights of bundled models come from, in the format of `source`")
    files: dict[str, FileRecord] = Field(description="path inside the bundle → its record; all files but the manifest")

    def computed_digest(self) -> str:
        """sha256 over the manifest without its digest."""
        return digest_of_body(self.model_dump(exclude={"digest"}))

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n"


def digest_of_body(body: dict[str, Any]) -> str:
    """sha256 over the fields of a manifest, without its digest."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Bundle:
    """A checked bundle."""

    path: Path
    manifest: Manifest

    def artifacts(self) -> dict[str, Artifact]:
        """kind → artifact, each bound to the bundle's fingerprint."""
        classes = artifact_classes()
        found = {}
        for kind in self.manifest.versions:
            bound = None if kind in UNBOUND else self.manifest.fingerprint
            found[kind] = classes[kind].load(self.path / "artifacts" / kind, fingerprint=bound)
        return found

    def files(self, models_root: Path) -> PairFiles:
        """The pair's model folders, from the bundle or from `models_root`, with digests and fingerprint checked."""
        folders = {role: self._folder(role, record, models_root) for role, record in self.manifest.models.items()}
        weights = {role: record.weights_sha256 for role, record in self.manifest.models.items()}
        found = combine_fingerprint(weights, tokenizer_digest(folders["target"]), self.manifest.dtype)
        if found != self.manifest.fingerprint:
            raise BundleError(f"the bundle {self.path} was made for fingerprint {self.manifest.fingerprint[:12]} of "
                              f"pair {self.manifest.pair}, the models here give {found[:12]}: fetch that pair's models "
                              "or deploy again", code="another_pair")
        return PairFiles(self.manifest.pair, folders["target"], folders.get("draft"), folders.get("qualifier"))

    def _folder(self, role: ModelRole, record: ModelRecord, models_root: Path) -> Path:
        bundled = record.source == "bundled"
        folder = (self.path if bundled else models_root) / record.folder
        name = f"the {role} of pair {self.manifest.pair}"
        if not folder.is_dir():
            raise BundleError(f"{name} ({record.source}) is not at {folder}: fetch it there (any `draftwell generate "
                              f"--pair {self.manifest.pair}` does), set DRAFTWELL_MODELS, or deploy --with-weights",
                              code="missing_models")
        found = self._bundled_digest(record.folder) if bundled else model_digest(folder)
        if found != record.weights_sha256:
            raise BundleError(f"{name} at {folder} has weights {found[:12]}, the bundle needs "
                              f"{record.weights_sha256[:12]}: fetch the pair again or deploy again",
                              code="other_weights")
        return folder

    def _bundled_digest(self, folder: str) -> str:
        """Digest of a bundled model from the file digests that `open_bundle` has checked."""
        if is_artifact(self.path / folder):
            return digest_of(self.path / folder)
        place = PurePosixPath(folder)
        return combine_digests({PurePosixPath(name).name: record.sha256 for name, record in self.manifest.files.items()
                                if PurePosixPath(name).parent == place and name.endswith(".safetensors")})


def artifact_classes() -> dict[str, type[Artifact]]:
    """kind → class; imported here because some classes import torch."""
    from serving.artifacts.acceptance_head import AcceptanceHead
    from serving.artifacts.acceptance_table import AcceptanceTable
    from serving.artifacts.correction_memory import CorrectionMemory
    from serving.artifacts.decoding_config import DecodingConfig
    from serving.artifacts.distilled_draft import DistilledDraft
    from serving.artifacts.hardware_profile import HardwareProfile
    from serving.artifacts.verifier import Verifier

    kinds: tuple[type[Artifact], ...] = (
        AcceptanceHead, AcceptanceTable, CorrectionMemory, DecodingConfig, DistilledDraft, HardwareProfile, Verifier)
    return {cls.kind: cls for cls in kinds}


def open_bundle(path: Path) -> Bundle:
    """Check a bundle and open it.

    Args:
        path: the bundle's folder, or a link to it (`dist/<pair>/current`), which is followed once.
    Raises:
        BundleError: it is missing, damaged, holds links or unlisted files, mixes pairs, or is newer than this runtime. The message names
            the file; nothing has been loaded.
    """
    path = path.resolve()
    if not path.is_dir():
        raise BundleError(f"there is no bundle at {path}: build one with `draftwell deploy`", code="no_bundle")
    manifest = _read_manifest(path)
    _check_tree(path, manifest)
    with ThreadPoolExecutor(HASHING_THREADS) as pool:  # hashing releases the GIL; the first wrong file in order is reported
        for _ in pool.map(lambda item: _check_file(path, *item), manifest.files.items()):
            pass
    for kind in manifest.versions:
        _check_artifact(path, kind, manifest)
    return Bundle(path, manifest)


def refuse_inside(path: Path, written: Mapping[str, Path]) -> None:
    """Refuse to write into a bundle: the next start would find a file that the manifest does not list.

    Args:
        path: the bundle's folder, or a link to it; a folder that is not a bundle is left to `open_bundle`.
        written: variable or option that names a folder to write to → the folder.
    Raises:
        BundleError: one of them is the bundle, or is inside it (`folder_inside_bundle`).
    """
    bundle = path.resolve()
    if not (bundle / MANIFEST).is_file():
        return
    for name, folder in written.items():
        if folder.resolve().is_relative_to(bundle):
            raise BundleError(f"{name} would be {folder}, inside the bundle {bundle}, where nothing may be written: "
                              f"set {name} to another folder", code="folder_inside_bundle")


def _check_tree(path: Path, manifest: Manifest) -> None:
    """Refuse links, and files that the manifest does not list, except the digests that the runtime keeps next to weights and temporary
    files of them from another or a killed server."""
    models = {path / record.folder for record in manifest.models.values()}
    listed = {*manifest.files, MANIFEST, *(f"{record.folder}/{SIDECAR}" for record in manifest.models.values())}
    for file in sorted(_entries(path)):
        if file.is_symlink():
            raise BundleError(f"{file} is a link, and bundles must not contain links: remove it or deploy again",
                              code="link_in_bundle")
        if file.parent in models and is_left_over(file.name, SIDECAR):
            continue
        if not file.is_dir() and file.relative_to(path).as_posix() not in listed:
            raise BundleError(f"{file} is not part of the bundle: remove it or deploy again", code="unlisted_file")


def _entries(path: Path) -> Iterator[Path]:
    """All entries below a folder; links are not followed."""
    for folder, folders, files in os.walk(path):
        yield from (Path(folder) / name for name in (*folders, *files))


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        data: Any = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise BundleError(f"{path} is not a bundle (no {MANIFEST}): build one with `draftwell deploy`",
                          code="no_bundle") from error
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{file} is truncated or not JSON: deploy again", code="damaged_manifest") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA:
        raise BundleError(f"{file} has schema {version}, this runtime reads up to {SCHEMA}: upgrade draftwell",
                          code="newer_bundle")
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BundleError(f"{file} is not a bundle manifest ({place}: {first['msg']}): deploy again",
                          code="damaged_manifest") from error
    if manifest.digest != digest_of_body({key: value for key, value in data.items() if key != "digest"}):
        raise BundleError(f"{file} was changed since it was made (its digest differs): deploy again",
                          code="changed_file")
    if "target" not in manifest.models:
        raise BundleError(f"{file} names no target: deploy again", code="damaged_manifest")
    for name in (*manifest.files, *(record.folder for record in manifest.models.values())):
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise BundleError(f"{file} names the path {name!r}, which leaves the bundle: deploy again",
                              code="damaged_manifest")
    return manifest


def _check_file(path: Path, name: str, record: FileRecord) -> None:
    file = path / name
    if not file.is_file():
        raise BundleError(f"the bundle lacks its file {file}: deploy again", code="missing_file")
    if (size := file.stat().st_size) != record.size:
        raise BundleError(f"{file} has {size} bytes, not {record.size}: it was truncated or changed, deploy again",
                          code="changed_file")
    if sha256_file(file) != record.sha256:
        raise BundleError(f"{file} was changed since it was made (sha256 differs): deploy again", code="changed_file")


def _check_artifact(path: Path, kind: str, manifest: Manifest) -> None:
    folder = path / "artifacts" / kind
    if kind not in ARTIFACT_SCHEMAS:
        raise BundleError(f"{path} holds a {kind}, which this runtime does not know: upgrade draftwell",
                          code="newer_bundle")
    if f"artifacts/{kind}/artifact.json" not in manifest.files:
        raise BundleError(f"the bundle {path} lacks its artifact {kind}: deploy again", code="missing_file")
    try:
        found = read_manifest(folder)
    except ArtifactError as error:
        raise BundleError(f"{folder} holds no artifact: deploy again", code="wrong_artifact") from error
    if found["kind"] != kind:
        raise BundleError(f"{folder} holds a {found['kind']}, not a {kind}: deploy again", code="wrong_artifact")
    if found["schema_version"] > ARTIFACT_SCHEMAS[kind]:
        raise BundleError(f"the {kind} in {folder} has schema {found['schema_version']}, this runtime reads up to "
                          f"{ARTIFACT_SCHEMAS[kind]}: upgrade draftwell", code="newer_bundle")
    mark = found["provenance"]["fingerprint"]
    if kind not in UNBOUND and mark != manifest.fingerprint:
        raise BundleError(f"the {kind} in {folder} has fingerprint {mark[:12]}, the bundle "
                          f"{manifest.fingerprint[:12]}: it belongs to another pair, deploy again", code="another_pair")
