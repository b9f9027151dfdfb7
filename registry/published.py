"""A registered version of an artifact, as this project sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draftwell.serving.errors import DraftwellError
from draftwell.serving.format import FORMAT, check_format

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

FORMAT_TAG = "format"
"""Tag of a version that says which format of `draftwell.serving.format` it was published in."""

TENANTS = "tenants"
"""Tag of a version: whose recorded requests it was made of, with spaces between."""

TAKEN = (
    "IntegrityError",
    "UniqueViolation",
    "UNIQUE constraint",
    "duplicate key",
    "Model Version creation error",
)
"""What errors of MLflow's databases say of a row that another process has inserted."""


@dataclass(frozen=True)
class Published:
    """A registered version of an artifact.

    Args:
        kind: what it is, such as verifier.
        name: registered model, `<kind>.<pair>`.
        version: counted from 1 within the name.
        run_id: the run that logged it.
        digest: `digest_of` its folder.
        source: where its files are stored.
        tags: digest, fingerprint, trace_digest, parents (JSON, kind → digest), git_commit and what
            was added later.
        created: when it was registered, in milliseconds since 1970 by the registry's clock.
    """

    kind: str
    name: str
    version: int
    run_id: str
    digest: str
    source: str = ""
    tags: Mapping[str, str] = field(default_factory=dict, compare=False)
    created: int = field(default=0, compare=False)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the pair it belongs to."""
        return self.tags.get("fingerprint", "")

    @property
    def tenants(self) -> list[str]:
        """Whose recorded requests it was made of (`draftwell.serving.recording.tenants`)."""
        return self.tags.get(TENANTS, "").split()

    @property
    def parents(self) -> dict[str, str]:
        """kind → digest of what it was made from.

        Raises:
            DraftwellError: a person has edited the tag (`tag_changed`).
        """
        try:
            found = json.loads(self.tags.get("parents", "{}"))
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
            raise DraftwellError(
                f"the tag parents of {self.name} version {self.version} was changed in MLflow: "
                "publish the same artifact again, which sets it, or delete the tag",
                code="tag_changed",
            )
        return found


def insert_or_change(write: Callable[[], object]) -> None:
    """Write an alias, a tag, a dataset or a version: MLflow looks first and inserts then, and the
    slower of two processes finds the row taken."""
    from mlflow.exceptions import MlflowException

    try:
        write()
    except MlflowException as error:
        if not any(word in str(error) for word in TAKEN):
            raise
        write()


def is_ours(version: ModelVersion) -> bool:
    """Whether Draftwell made a version of one of its models: whoever may write to MLflow may add
    others there."""
    return FORMAT_TAG in version.tags or "digest" in version.tags


def published_of(version: ModelVersion) -> Published:
    """MLflow's version as ours.

    Raises:
        DraftwellError: another version of Draftwell, or somebody else, has published it
            (`not_ours`).
    """
    written = version.tags.get(FORMAT_TAG, "")
    name = f"{version.name} version {version.version}"
    if not is_ours(version):
        raise DraftwellError(
            f"{name} was not published by Draftwell: take its aliases away in MLflow, or name "
            "another version",
            code="not_ours",
        )
    check_format(
        int(written) if written.isdecimal() else None,
        f"{name} in the registry",
        f"where its tag {FORMAT_TAG} was changed in MLflow, set it to {FORMAT} again; else `make "
        "reset`, or name an empty registry (MLFLOW_TRACKING_URI), then run `draftwell tune` or the "
        "pipeline again",
    )
    return Published(
        version.name.split(".", 1)[0],
        version.name,
        int(version.version),
        version.run_id or "",
        version.tags.get("digest", ""),
        version.source or "",
        dict(version.tags),
        version.creation_timestamp,
    )
