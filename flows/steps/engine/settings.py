"""Settings of the loop on another engine: of `draftwell demo`, of its recalibration, and of the
flow that runs that."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from draftwell.components.tune.engines.settings import EngineTuneSettings
from draftwell.serving.errors import DraftwellError


class LoopSettings(BaseModel):
    """What a user asked for. Methods and levels may be written with commas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    minutes: float = Field(45.0, gt=0, description="for the whole loop")
    methods: tuple[str, ...] | None = Field(
        None, description="ways to speculate to choose among; None: all that are possible"
    )
    levels: tuple[int, ...] = Field(
        (1, 8),
        description="requests at once, ascending from 1; the highest that there is time to measure "
        "is what the bundle serves at once",
    )
    collect_prompts: int = Field(24, ge=1, description="prompts that texts are collected for")
    tune_prompts: int = Field(12, ge=2, description="prompts of the tuning, none of the others")
    bench_prompts: int = Field(16, ge=2, description="prompts of the gate, none of the others")
    max_tokens: int = Field(64, ge=1, description="of an answer")
    train_minutes: float | None = Field(
        None,
        gt=0,
        description="training time of a head; None trains one only where the pair has none, in a "
        "fifth of the time",
    )
    serve_seconds: float = Field(
        90.0,
        gt=0,
        description="how long what is deployed is asked, by as many clients as were "
        "measured at once",
    )
    port: int | None = Field(None, description="that it is served on; None takes a free one")
    out: Path = Field(Path("dist"), description="folder of bundles")
    grid: bool = Field(
        False,
        description="at last measure every setting again on all prompts of the tuning, for its "
        "regret; this takes further time",
    )
    fresh: bool = Field(
        False, description="begin again instead of with what an earlier run has finished"
    )

    @field_validator("methods", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return names(value)

    @field_validator("levels", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        return numbers(value)

    @property
    def needed(self) -> int:
        """Prompts of all steps together."""
        return self.collect_prompts + self.tune_prompts + self.bench_prompts

    def tuning(self, temperature: float) -> EngineTuneSettings:
        """Settings of the tuning for requests of a temperature."""
        return tune_settings(
            methods=self.methods,
            levels=self.levels,
            max_tokens=self.max_tokens,
            temperature=temperature,
        )


class EngineDriftSettings(LoopSettings):
    """What the check and the recalibration of another engine work on."""

    engine: Literal["vllm"] = "vllm"
    pair: str = Field("default", description="name, alias or YAML file of a pair")
    dtype: str | None = Field(
        None, pattern="^(float32|bfloat16)$", description="None takes the pair's own"
    )
    device: str | None = Field(
        None,
        pattern="^(cpu|cuda)$",
        description="None takes the device that the installed engine is built for",
    )
    threads: int | None = Field(
        None, ge=1, description="compute threads of the engine; None takes all cores"
    )
    spool: Path | None = Field(
        None, description="folder of counts; None takes $DRAFTWELL_HOME/spool/<pair>"
    )
    prompts: Path | None = Field(
        None,
        description=(
            "file or folder of recorded requests (JSONL); None takes those in the spool's folder"
        ),
    )
    restart: str | None = Field(
        None,
        description="command of a shell that restarts the servers after `current` has moved; None "
        "leaves that to a person",
    )


def tune_settings(**given: Any) -> EngineTuneSettings:
    """Settings of a tuning; methods and levels may be written with commas, and what is None keeps
    its default."""
    found = {name: value for name, value in given.items() if value is not None}
    if "methods" in found:
        found["methods"] = names(found["methods"])
    if "levels" in found:
        found["levels"] = numbers(found["levels"])
    return EngineTuneSettings(**found)


def names(value: Any) -> Any:
    """Names that are written with commas; anything else as it is.

    >>> names("ngram, suffix")
    ('ngram', 'suffix')
    """
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def numbers(value: Any) -> Any:
    """Numbers that are written with commas; anything else as it is.

    >>> numbers("1,4,16")
    (1, 4, 16)
    """
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise DraftwellError(
            f"--levels {value!r}: write numbers above 0 with commas, such as 1,4,16",
            code="bad_levels",
        )
    return tuple(map(int, parts))
