"""Another model in the draft's place: baselines that PyramidSD's paper drafts with its
qualifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.output import Model

DrafterRole = Literal["draft", "qualifier"]


def drafting_with(drafter: DrafterRole, models: Mapping[Role, Model]) -> dict[Role, Model]:
    """A pair's models with the drafter as its draft.

    Raises:
        DraftwellError: the pair has no such model.
    """
    if drafter not in models:
        raise DraftwellError(
            f"drafter={drafter} needs a {drafter} model, which this pair does not have: "
            "leave it out, or take a pair "
            "that `draftwell pairs` shows with one",
            code="model_missing",
        )
    return {**models, "draft": models[drafter]}
