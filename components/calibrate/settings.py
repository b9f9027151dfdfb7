"""Settings of the calibration, with every default in one place."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class MemorySettings(BaseModel):
    """How the prompts are decoded whose rejections are counted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_tokens: int = Field(96, ge=1, description="new tokens per prompt")
    batch: int = Field(
        8,
        ge=1,
        description="concurrent requests, as far as the pair has slots; except for near-ties the "
        "counts do not "
        "depend on it",
    )
    smallest_count: int = Field(
        1,
        ge=1,
        description="pairs that were seen less often are left out of the memory: most of a "
        "long tail "
        "was "
        "seen once",
    )
