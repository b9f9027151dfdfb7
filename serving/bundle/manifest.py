"""A bundle's `manifest.json`: what is in it, and reading one with one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.serving.artifacts.pair_files import ModelRole
from draftwell.serving.errors import DraftwellError, first_wrong
from draftwell.serving.files import json_digest
from draftwell.serving.format import FORMAT, check_format

MANIFEST = "manifest.json"
MAX_BYTES = 64 << 20
"""Of a manifest that is read."""


class BundleError(DraftwellError):
    """A bundle that is missing, damaged, foreign or of another version."""

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
    weights_sha256: str = Field(
        description="digest of the weights, as `pair_files.model_digest` computes it"
    )
    folder: str = Field(
        description=(
            "folder under $DRAFTWELL_MODELS, or inside the bundle where the source is bundled"
        )
    )


class Manifest(_Strict):
    """The contents of `manifest.json`."""

    schema_version: int = FORMAT
    digest: str = Field("", description="sha256 over all other fields")
    pair: str
    device: str = Field(pattern="^(cpu|cuda)$", description="cpu or cuda")
    device_class: str | None = Field(None, description="machine class of the hardware profile")
    dtype: str
    chat: bool = Field(False, description="whether prompts go through the chat template")
    fingerprint: str = Field(description="pair fingerprint")
    release_version: int
    release_digest: str
    gated: bool = Field(description="whether a passed gate record stood for the release")
    ungated_reason: str | None = Field(None, description="why it was deployed without one")
    sampled_as_greedy: bool = Field(
        False,
        description="the greedy choice serves sampled requests too, where none was tuned for "
        "them: it is lossless, and the gate measured it to be fast enough",
    )
    versions: dict[str, int] = Field(description="kind → registered version")
    runs: dict[str, str] = Field(description="kind → run id in the registry")
    runtime: str | None = Field(
        None, description="version of the runtime whose wheel is in the bundle"
    )
    models: dict[ModelRole, ModelRecord]
    settings_sha256: dict[ModelRole, str] = Field(
        default_factory=dict,
        description="of models whose weights are not bundled: digest of what lies next to them "
        "(configuration, tokenizer, chat template), as `pair_files.model_settings_digest` "
        "computes it; checked under a key",
    )
    origins: dict[ModelRole, str] = Field(
        default_factory=dict,
        description="where the weights of bundled models come from, worded as a source",
    )
    files: dict[str, FileRecord] = Field(
        description="path inside the bundle → its record; all files but this one"
    )

    def computed_digest(self) -> str:
        """sha256 over the manifest without its digest."""
        return json_digest(self.model_dump(exclude={"digest"}))

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n"


def manifest_bytes(path: Path) -> bytes:
    """What is in the manifest of a bundle's folder, not parsed: what a signature is over."""
    file = path / MANIFEST
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise BundleError(
            f"{path} is not a bundle (no {MANIFEST}): build one with `draftwell deploy`",
            code="no_bundle",
        ) from error
    except OSError as error:
        raise BundleError(
            f"{file} cannot be read ({error}): deploy again", code="damaged_manifest"
        ) from error
    if len(data) > MAX_BYTES:
        raise BundleError(
            f"{file} is larger than {MAX_BYTES >> 20} MiB: deploy again", code="damaged_manifest"
        )
    return data


def read_bundle_manifest(path: Path, written: bytes | None = None) -> Manifest:
    """The checked manifest of a bundle's folder.

    Args:
        written: its `manifest_bytes`, where they were read before.
    """
    file = path / MANIFEST
    try:
        data: Any = json.loads(manifest_bytes(path) if written is None else written)
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{file} is truncated or not JSON: deploy again", code="damaged_manifest"
        ) from error
    if isinstance(data, dict) and isinstance(data.get("schema_version"), int):
        check_format(
            data["schema_version"], f"the bundle {path}", "deploy its release again", BundleError
        )
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        raise BundleError(
            f"{file} is not a bundle manifest ({first_wrong(error)}): deploy again",
            code="damaged_manifest",
        ) from error
    if manifest.digest != json_digest(
        {key: value for key, value in data.items() if key != "digest"}
    ):
        raise BundleError(
            f"{file} was changed since it was made (its digest differs): deploy again",
            code="changed_file",
        )
    if "target" not in manifest.models:
        raise BundleError(f"{file} names no target: deploy again", code="damaged_manifest")
    for name in (*manifest.files, *(record.folder for record in manifest.models.values())):
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise BundleError(
                f"{file} names the path {name!r}, which leaves the bundle: deploy again",
                code="damaged_manifest",
            )
    return manifest
