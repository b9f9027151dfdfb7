"""The file of what was measured on a GPU: one for each pair and card, written after every part.

`make gpu` writes it, resumes from it, and makes the table of docs/gpu.md; `draftwell
reproduce import` takes it into the registry of another machine. A digest over all of it shows a
file that was cut or changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from draftwell.components.bench.gpu.card import Card
from draftwell.components.bench.gpu.limited import State
from draftwell.components.bench.schema import Frozen
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, read_text, write_json


class PartResult(Frozen):
    """What became of one part."""

    state: State
    why: str = ""
    """In a line, where it is not measured."""
    seconds: float = 0.0
    code: str
    """`code_digest` of the project that ran."""
    commit: str | None = None
    at: str
    """When it ended, ISO 8601."""
    reports: dict[str, Any] = Field(default_factory=dict)
    """Name → JSON of the reports that it wrote, those before it was stopped included."""


class GpuResults(Frozen):
    """All parts of one pair on one card."""

    schema_version: Literal[1] = 1
    pair: str
    card: Card
    parts: dict[str, PartResult] = Field(default_factory=dict)
    digest: str = ""
    """sha256 over all other fields."""

    def computed_digest(self) -> str:
        """sha256 over the results without their digest."""
        return json_digest(self.model_dump(mode="json", exclude={"digest"}))

    def with_part(self, name: str, part: PartResult) -> GpuResults:
        """The same with a part; one that was measured stays where it could not be measured now."""
        before = self.parts.get(name)
        if before is not None and before.state == "measured" != part.state:
            return self
        return self.model_copy(update={"parts": {**self.parts, name: part}})

    def has(self, name: str, code: str) -> bool:
        """Whether a part was measured with this code."""
        part = self.parts.get(name)
        return part is not None and (part.state, part.code) == ("measured", code)


def file_of(folder: Path, pair: str, card: Card) -> Path:
    """Where the results of a pair and a card are kept."""
    return folder / f"{pair}-{card.device_class}.json"


def write_results(file: Path, results: GpuResults) -> None:
    """Write results with their digest, atomically."""
    signed = results.model_copy(update={"digest": results.computed_digest()})
    write_json(file, signed.model_dump(mode="json"))


def read_results(file: Path) -> GpuResults:
    """The results in a file.

    Raises:
        DraftwellError: it is missing or holds none (`results_unreadable`), or was changed since it
            was written (`results_changed`).
    """
    again = "copy it again from where `make gpu` wrote it"
    try:
        found = GpuResults.model_validate(json.loads(read_text(file)))
    except OSError as error:
        raise DraftwellError(
            f"{file} cannot be read ({error.strerror}): {again}", code="results_unreadable"
        ) from error
    except (ValidationError, ValueError, RecursionError) as error:
        raise DraftwellError(
            f"{file} holds no results of `make gpu`, or is cut: {again}",
            code="results_unreadable",
        ) from error
    if found.digest != found.computed_digest():
        raise DraftwellError(
            f"{file} was changed since it was written (its digest differs): {again}",
            code="results_changed",
        )
    return found


def results_in(folder: Path) -> list[GpuResults]:
    """All results in a folder, by name of their files."""
    return [read_results(file) for file in sorted(folder.glob("*-cuda-*.json"))]
