"""Settings of a tuning on another engine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from draftwell.components.engines.vllm_methods import METHODS
from draftwell.components.tune.settings import RequestSettings
from draftwell.serving.errors import DraftwellError

Lengths = tuple[int, ...]


class EngineTuneSettings(RequestSettings):
    """What is tried, and at how many requests at once.

    Raises:
        DraftwellError: as all settings; a name that is no method (`bad_method`), or levels that do
            not ascend from 1 (`bad_tune_setting`).
    """

    methods: tuple[str, ...] = Field(
        METHODS[1:], description="names to choose among, besides plain decoding"
    )
    levels: Lengths = Field(
        (1,),
        min_length=1,
        description="requests at once, ascending from 1; several give lengths by load",
    )
    schedule: Path | None = Field(
        None,
        description="file of draft lengths by load from elsewhere, which are tried beside others",
    )

    @field_validator("methods")
    @classmethod
    def known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """Only methods of the engine."""
        for name in names:
            if name not in METHODS:
                raise DraftwellError(
                    f"vLLM has no method {name!r} here: choose from {', '.join(METHODS)}",
                    code="bad_method",
                )
        return names

    @field_validator("levels")
    @classmethod
    def ascending(cls, levels: Lengths) -> Lengths:
        """From one request on."""
        if levels[0] != 1 or list(levels) != sorted(set(levels)):
            raise DraftwellError(
                "levels are numbers of requests at once, ascending from 1, such as 1,4,16, not "
                f"{','.join(map(str, levels))}",
                code="bad_tune_setting",
            )
        return levels


DEFAULTS = EngineTuneSettings()
