"""Settings of the gate: how a release is measured before it is judged. Thresholds are data, in
registry/gates.yaml."""

from __future__ import annotations

from pydantic import Field

from draftwell.components.bench.settings import DEFAULTS as BENCH
from draftwell.serving.settings import Settings

ROUNDS = 2
"""Interleaved rounds over the prompts; of each prompt the median counts (of two the faster), so
that another process that took the core for a moment does not."""


class GateSettings(Settings):
    """What a release is measured on, and what becomes of the verdict."""

    called = "gate setting"

    limit: int | None = Field(16, ge=1, description="how many prompts; None takes all")
    max_tokens: int = Field(BENCH.max_tokens, ge=1, description="tokens to emit per prompt at most")
    dry_run: bool = Field(False, description="keep nothing in the registry, and move no alias")
    unmeasured: str | None = Field(
        None,
        description="why a release may pass although a required check cannot run here; kept with "
        "the verdict. None: not enough evidence then",
    )


DEFAULTS = GateSettings()
