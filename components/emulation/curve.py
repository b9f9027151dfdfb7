"""Curves: how long a forward pass over so many tokens takes on an emulated device.

A curve is data with a source: what was measured on a GPU, or a paper's own costs as shares of a
target pass. More tokens never take less time; measured noise that says so has to be taken out
before (`serving.artifacts.forward_costs.ascending`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftwell.serving.artifacts.forward_costs import seconds_at
from draftwell.serving.errors import DraftwellError, first_wrong
from draftwell.serving.files import read_text
from draftwell.serving.runtime.commands import Forward, Role

CURVES = Path(__file__).with_name("curves.json")
"""The curves that come with the project: name → curve."""
LONGEST = 65
"""Tokens of the longest pass that strategies are told of: DuoDecoding's longest draft, and one."""


class Curve(BaseModel):
    """Times of a target and of a draft on devices of their own.

    Raises:
        DraftwellError: of `curve_of`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str = Field(min_length=1, description="who measured it, on what; or whose costs")
    unit: str = Field("s", description="of its times: seconds, or passes of the target")
    target: dict[int, float] = Field(description="tokens → time of a pass, one token among them")
    draft: dict[int, float] | None = Field(
        None, description="the same of the draft; None: it takes the time that it computes"
    )
    between: Literal["linear", "steps"] = Field(
        "linear",
        description="a pass between two known sizes: on the line between them, or the larger one's",
    )

    @model_validator(mode="after")
    def _with_one_token(self) -> Self:
        for role, times in (("target", self.target), ("draft", self.draft)):
            if times is not None and (1 not in times or min(times.values()) <= 0 or min(times) < 1):
                raise ValueError(f"{role}: it needs a pass over one token, and times above 0")
        return self

    @property
    def cost(self) -> float | None:
        """c: a draft pass over a target pass, both over one token; None where the draft computes
        without waiting."""
        return None if self.draft is None else self.draft[1] / self.target[1]

    def at(self, role: Role, tokens: int) -> float | None:
        """Time of a pass over `tokens` >= 1 tokens; None of a draft that does not wait.

        >>> flat = Curve(name="c", source="a paper", target={1: 1.0}, draft={1: 0.125})
        >>> flat.at("target", 9), flat.at("draft", 2)
        (1.0, 0.125)
        """
        times = self.target if role == "target" else self.draft
        if times is None:
            return None
        if self.between == "linear":
            return seconds_at(times, tokens)
        return times[min((size for size in times if size >= tokens), default=max(times))]

    def time_of(self, role: Role, rows: Sequence[Forward]) -> float | None:
        """Time of one batch of forward passes."""
        return self.at(role, sum(len(row.tokens) for row in rows))

    def target_times(self) -> dict[int, float]:
        """Tokens → time of a target pass, as a hardware profile holds them."""
        return {tokens: self.at("target", tokens) or 0.0 for tokens in range(1, LONGEST + 1)}


def curve_of(name: str, fields: Mapping[str, Any]) -> Curve:
    """A curve of plain data.

    Raises:
        DraftwellError: a field is missing or unknown, or a time is not above 0 (`bad_curve`); more
            tokens take less time (`curve_not_monotone`).
    """
    try:
        curve = Curve.model_validate({"name": name, **fields})
    except ValidationError as error:
        raise DraftwellError(
            f"curve {name}: {first_wrong(error)}: correct it", code="bad_curve"
        ) from error
    for role, times in (("target", curve.target), ("draft", curve.draft or {})):
        for fewer, more in pairwise(sorted(times)):
            if times[more] < times[fewer]:
                raise DraftwellError(
                    f"curve {name}: {role} passes over {more} tokens take {times[more]:g}, less "
                    f"than the {times[fewer]:g} of {fewer}: measure again, or give both the "
                    "smaller time",
                    code="curve_not_monotone",
                )
    return curve


def read_curves(path: Path = CURVES) -> dict[str, Curve]:
    """The curves of a JSON file, by name.

    Raises:
        DraftwellError: as `curve_of`; a file that cannot be read, or holds no JSON object.
    """
    try:
        found = json.loads(read_text(path))
        return {name: curve_of(name, fields) for name, fields in found.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DraftwellError(
            f"{path} holds no curves: give a JSON object of name → curve", code="bad_curve"
        ) from error


def find_curve(wanted: str) -> Curve:
    """A curve by its name, or the only one in a file of one's own.

    Raises:
        DraftwellError: there is none (`unknown_curve`); a file cannot be used (`read_curves`).
    """
    if wanted.endswith(".json"):
        own = read_curves(Path(wanted))
        if len(own) == 1:
            return next(iter(own.values()))
        raise DraftwellError(
            f"{wanted} holds {len(own)} curves: leave one in it", code="unknown_curve"
        )
    known = read_curves()
    if wanted not in known:
        raise DraftwellError(
            f"there is no curve {wanted}: take {', '.join(known)}, or a JSON file with one",
            code="unknown_curve",
        )
    return known[wanted]
