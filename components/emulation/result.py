"""The file of an emulated run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from draftwell.components.bench.schema import Frozen, Machine
from draftwell.components.emulation.curve import Curve
from draftwell.serving.errors import DraftwellError, first_wrong
from draftwell.serving.files import read_text, write_json

Placement = Literal["own", "shared"]
"""Draft and target on devices of their own, at once; or in turn on one that they share."""


class EmulatedRow(Frozen):
    """One strategy."""

    strategy: str
    parameters: dict[str, Any]
    speed: float | None = Field(
        description="tokens for each unit of the curve's time, the prompt's reading left out; None "
        "where the run is void"
    )
    acceptance: float | None = Field(description="accepted / judged draft tokens")
    target_calls: int
    outside: float = Field(description="share of the time in which no pass ran")
    late: float = Field(description="share of its passes that ended behind their deadline")
    again: int = Field(0, description="decodings that do not count, for passes in them were late")
    times: tuple[float, ...] = Field((), description="of each prompt, in the curve's unit")
    tokens: tuple[int, ...] = Field((), description="of each prompt")
    accepted: tuple[int, ...] = Field((), description="draft tokens that were kept of each prompt")
    judged: tuple[int, ...] = Field((), description="draft tokens that were judged of each prompt")


class EmulatedRatio(Frozen):
    """Speed over another strategy's on the same prompts, with the ends of its interval (5 % and 95
    %)."""

    contender: str
    over: str
    ratio: float
    low: float
    high: float


class EmulatedRun(Frozen):
    """An emulated run, complete.

    Args (fields):
        stretch: real seconds for each unit of the curve's times.
        void: why its times do not count; None: they do.
        calibration: prompts that SPIDE's acceptance table was counted on before.
        identical: prompts whose texts are the same from all lossless strategies.
        first_kept: of each prompt: whether the draft's first token is the target's.
        seconds: that the run took.
    """

    version: Literal[1] = 1
    label: Literal["emulated"] = "emulated"
    pair: str
    fingerprint: str
    curve: Curve
    placement: Placement
    stretch: float
    passes: int
    late: float
    void: str | None
    max_tokens: int
    prompts: str
    prompt_ids: tuple[str, ...]
    calibration: int
    identical: int
    first_kept: tuple[bool, ...] = ()
    seconds: float
    machine: Machine
    rows: dict[str, EmulatedRow]
    ratios: tuple[EmulatedRatio, ...]

    def write(self, path: Path) -> Path:
        """Write it as JSON, atomically."""
        return write_json(path, self.model_dump(mode="json"))


def read_run(path: Path) -> EmulatedRun:
    """A run that was written.

    Raises:
        DraftwellError: the file cannot be read (`bad_emulated_run`).
    """
    try:
        return EmulatedRun.model_validate_json(read_text(path))
    except (OSError, ValidationError) as error:
        why = first_wrong(error) if isinstance(error, ValidationError) else str(error)
        raise DraftwellError(
            f"{path} holds no emulated run ({why}): run it again", code="bad_emulated_run"
        ) from error
