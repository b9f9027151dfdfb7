"""Near copies: drafts, and qualifiers, that are made of the target's own weights when they are
loaded, and have none of their own on disk.

A near copy leaves out some of the target's layers, or rounds its weights. It agrees with the target
far more often than a small model does, at a larger share of its cost: next to a padded target
(`draftwell.serving.runtime.models.padding`) that is where large pairs of one family are. A copy may
be padded as well, to a share of the target: so a qualifier stands between draft and target. Its
folder holds this recipe alone.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import Weights

RECIPE = "near_copy.json"
"""The only file of a near copy's folder."""


class NearCopy(BaseModel):
    """How a target becomes its own draft or qualifier."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drop_layers: tuple[int, ...] = Field(
        (), description="layers of the target that are left out, counted from 0"
    )
    weights: Weights | None = Field(
        None, description="int8 or int4: what the weights of its layers are rounded to (CPU only)"
    )
    padded_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a padded target's parameters that the copy is padded to, "
        "where it has fewer; next to a target that is not padded, no copy is",
    )

    def to_json(self) -> bytes:
        """As its file holds it; equal recipes give equal bytes, also those that were written before
        copies were padded."""
        later = {"padded_share"} if self.padded_share is None else set()
        return (
            json.dumps(self.model_dump(mode="json", exclude=later), sort_keys=True) + "\n"
        ).encode()


def is_near_copy(folder: Path) -> bool:
    """Whether a model folder holds a recipe instead of weights."""
    return (folder / RECIPE).is_file()


def read_near_copy(folder: Path) -> NearCopy:
    """The recipe of a folder.

    Raises:
        DraftwellError: it cannot be read (`broken_near_copy`).
    """
    try:
        return NearCopy.model_validate_json((folder / RECIPE).read_bytes())
    except (OSError, ValidationError) as error:
        raise DraftwellError(
            (
                f"{folder / RECIPE} holds no recipe of a near copy: remove the folder, and it "
                "is written again"
            ),
            code="broken_near_copy",
        ) from error
