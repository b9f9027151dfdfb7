"""What every tool's results become: one run of a benchmark at one load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.components.engines.port import Acceptance, Message
from draftwell.serving.errors import DraftwellError, first_wrong

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Moment = Annotated[float, Field(ge=0, lt=2**36, allow_inf_nan=False)]
"""Seconds since 1970, within what a calendar has."""
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Checked = TypeVar("Checked", bound=BaseModel)


class Part(BaseModel):
    """What we read of a part of a tool's file; its other fields are not looked at."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Request(Message):
    """One request that was answered."""

    prompt: str = Field(description="what it is known by in another run on the same prompts")
    seconds: Seconds = Field(description="from its sending to its last token")
    tokens: int = Field(ge=1, description="that were generated")
    first_token_seconds: float | None = Field(None, ge=0, allow_inf_nan=False)

    @property
    def token_seconds(self) -> float | None:
        """Seconds for each token after the first; None where the first was not timed."""
        if self.first_token_seconds is None or self.tokens < 2:
            return None
        return (self.seconds - self.first_token_seconds) / (self.tokens - 1)


class BenchmarkRun(Message):
    """What a tool measured of one server at one load, warm-up left out."""

    tool: str
    version: str | None = Field(None, description="of the tool; None: its file does not say")
    when: str | None = Field(None, description="as the file has it, or ISO 8601")
    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    load: str = Field(description="in words, such as '8 at once' or '2 requests/s'")
    conditions: dict[str, Any] = Field(description="further ones that comparable runs share")
    completed: int = Field(ge=0, description="requests")
    failed: int = Field(ge=0)
    requests: tuple[Request, ...] = Field(
        (), description="in the order in which they were sent; empty: sums alone were saved"
    )
    details: str = Field(description="how the tool is told to save every request")
    seconds: float = Field(ge=0, allow_inf_nan=False, description="that the run took")
    tokens: float = Field(ge=0, allow_inf_nan=False, description="of all outputs")
    acceptance: Acceptance = Acceptance()


def at_once(requests: int) -> str:
    """A load in words, where the tool keeps so many requests going."""
    return f"{requests} at once"


def per_second(rate: float) -> str:
    """A load in words, where the tool sends so many requests a second."""
    return f"{rate:g} requests/s"


def checked(model: type[Checked], data: Any, file: Path) -> Checked:
    """A part of a file; the first value that is missing or wrong becomes one line.

    Raises:
        DraftwellError: a value is wrong (`bad_evidence`).
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise bad(file, first_wrong(error)) from error


def bad(file: Path, why: str) -> DraftwellError:
    """The error about a file that is no evidence."""
    return DraftwellError(f"{file}: {why}: run the benchmark again", code="bad_evidence")
