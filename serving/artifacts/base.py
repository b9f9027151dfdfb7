"""Artifacts: the small files that strategies need, with their provenance.

An artifact on disk is a folder: `artifact.json` (provenance, and the sha256 of every other file)
next to data files in safetensors, Arrow or JSON. Nothing is ever unpickled. Loading refuses,
by name, an artifact of another pair, of another kind or schema, or with a changed file.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, sha256_file, whole_folder

MANIFEST = "artifact.json"


class ArtifactError(DraftwellError):
    """An artifact that is missing, foreign, of another version, or changed."""

    code = "bad_artifact"


class Provenance(BaseModel):
    """Where an artifact comes from and what it may be used for."""

    model_config = ConfigDict(extra="forbid")

    pair: str = Field(description="name of the pair in the catalogue")
    fingerprint: str = Field(
        description="pair fingerprint: sha256 over weights, tokenizer and dtype"
    )
    device_class: str | None = Field(
        None, description="machine class that figures were measured on, where it matters"
    )
    trace_digest: str | None = Field(
        None, description="digest over all rows of the trace set it was made from"
    )
    parents: dict[str, str] = Field(
        default_factory=dict, description="kind → digest of the artifacts it was made from"
    )
    training_prompts: list[str] | None = Field(
        None,
        description="hashes of the prompts it has learnt from or was chosen on "
        "(components/prompts/overlap.py); None: not recorded",
    )
    unknown_prompts: list[str] = Field(
        default_factory=list,
        description="what it was made from whose prompts are not recorded, so that "
        "`training_prompts` lacks them",
    )
    tenants: list[str] = Field(
        default_factory=list,
        description="whose recorded requests are among its prompts "
        "(draftwell.serving.recording.tenants)",
    )
    git_commit: str | None = Field(None, description="commit of the project that made it")
    library_versions: dict[str, str] = Field(default_factory=dict)
    parameters: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, description="settings it was made with"
    )
    metrics: dict[str, float] = Field(
        default_factory=dict, description="figures measured when it was made"
    )

    def extended(
        self,
        parameters: Mapping[str, str | int | float | bool | None],
        metrics: Mapping[str, float],
    ) -> Provenance:
        """The same with further settings and figures."""
        return self.model_copy(
            update={
                "parameters": {**self.parameters, **parameters},
                "metrics": {**self.metrics, **metrics},
            }
        )


FileName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]
"""A file beside the manifest."""


class ManifestFile(BaseModel):
    """What `artifact.json` holds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: str
    schema_version: int
    files: dict[FileName, str] = Field(min_length=1, description="file name → sha256")
    provenance: Provenance


class Artifact(ABC):
    """Base of all artifact kinds: a kind says what its files are, this class keeps provenance and
    digests."""

    kind: ClassVar[str]
    schema_version: ClassVar[int] = 1

    provenance: Provenance
    digest: str | None = None
    """`digest_of` the folder that this was last read from or saved to; None for one in memory. What
    requests learn is not in it."""

    def at(self, temperature: float) -> Artifact:
        """The part of it that is for requests of a temperature: itself, unless a kind holds one for
        each class."""
        return self

    @abstractmethod
    def write_files(self, folder: Path) -> None:
        """Write the data files into an empty folder."""

    @classmethod
    @abstractmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        """Build the artifact from its data files."""

    def save(self, folder: Path) -> str:
        """Write the whole folder, in the place of an old one, and return its digest."""
        with whole_folder(folder) as place:
            self.write_files(place)
            files = {p.name: sha256_file(p) for p in sorted(place.iterdir())}
            manifest = {
                "kind": self.kind,
                "schema_version": self.schema_version,
                "files": files,
                "provenance": self.provenance.model_dump(),
            }
            (place / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        self.digest = digest_of(folder)
        return self.digest

    @classmethod
    def load(cls, folder: Path, *, fingerprint: str | None = None) -> Self:
        """Read an artifact and check it.

        Args:
            folder: the artifact's folder.
            fingerprint: fingerprint of the pair it shall be used with; None skips that check (tools
                that only look).
        Raises:
            ArtifactError: it is missing, of another kind, schema or pair, or a file was changed.
        """
        manifest = read_manifest(folder)
        if manifest["kind"] != cls.kind:
            raise ArtifactError(
                f"{folder} holds a {manifest['kind']}, not a {cls.kind}: publish or deploy it "
                "again",
                code="another_kind",
            )
        check_schema(folder, manifest, cls.schema_version)
        present = {path.name for path in folder.iterdir()} - {MANIFEST}
        if extra := sorted(present - set(manifest["files"])):
            raise ArtifactError(
                f"{folder / extra[0]} does not belong to the {cls.kind} there: publish or "
                "deploy it again",
                code="unlisted_file",
            )
        check_files(folder, manifest)
        provenance = Provenance.model_validate(manifest["provenance"])  # checked by read_manifest
        if fingerprint is not None and provenance.fingerprint != fingerprint:
            raise ArtifactError(
                f"the {cls.kind} in {folder} belongs to pair {provenance.pair} with fingerprint "
                f"{provenance.fingerprint[:12]}, not {fingerprint[:12]}: calibrate this "
                "pair (draftwell step calibrate)",
                code="another_pair",
            )
        try:
            artifact = cls.read_files(folder, provenance)
        except (KeyError, ValueError, TypeError, OSError) as error:
            raise ArtifactError(
                f"the {cls.kind} in {folder} cannot be read ({type(error).__name__}): "
                "publish or deploy it again"
            ) from error
        artifact.digest = digest_of_manifest(manifest)
        return artifact


def read_manifest(folder: Path) -> dict:  # type: ignore[type-arg]
    """The parsed `artifact.json` of a folder."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ArtifactError(
            f"{folder} holds no artifact (no {MANIFEST}): publish or deploy it again",
            code="no_artifact",
        )
    try:
        manifest = json.loads(path.read_text())
        ManifestFile.model_validate(manifest)
    except ValueError as error:
        raise ArtifactError(
            f"{path} is not an artifact manifest of this schema: publish or deploy it again, "
            "or upgrade draftwell",
            code="bad_manifest",
        ) from error
    return manifest  # type: ignore[no-any-return]


def check_schema(folder: Path, manifest: dict, newest: int) -> None:  # type: ignore[type-arg]
    """Refuse an artifact that another version of Draftwell has made in a schema of its own.

    Raises:
        ArtifactError: the schema is older (`older_schema`) or newer (`newer_schema`).
    """
    what = f"the {manifest['kind']} in {folder} has schema {manifest['schema_version']}"
    if manifest["schema_version"] > newest:
        raise ArtifactError(
            f"{what}, this runtime reads {newest}: upgrade draftwell", code="newer_schema"
        )
    if manifest["schema_version"] < newest:
        raise ArtifactError(
            f"{what} of an earlier Draftwell, this one reads {newest}: make it again",
            code="older_schema",
        )


def check_files(folder: Path, manifest: dict) -> None:  # type: ignore[type-arg]
    """Refuse an artifact with a file that is missing or changed."""
    for name, expected in manifest["files"].items():
        if not (folder / name).is_file():
            raise ArtifactError(
                f"{manifest['kind']} in {folder} lacks its file {name}: publish or deploy it again",
                code="missing_file",
            )
        if sha256_file(folder / name) != expected:
            raise ArtifactError(
                f"{folder / name} was changed since it was made (sha256 differs): publish or "
                "deploy it again",
                code="changed_file",
            )


def digest_of(folder: Path) -> str:
    """Digest of an artifact folder: sha256 over kind, schema and its files' digests (provenance
    left out)."""
    return digest_of_manifest(read_manifest(folder))


def digest_of_manifest(manifest: dict) -> str:  # type: ignore[type-arg]
    """As `digest_of`, of a manifest that was read already."""
    return json_digest([manifest["kind"], manifest["schema_version"], manifest["files"]])
