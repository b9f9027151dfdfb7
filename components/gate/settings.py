"""Settings of the gate: how a release is measured before it is judged. Thresholds are data, in registry/gates.yaml."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from components.bench.settings import DEFAULTS as BENCH


class GateSettings(BaseModel):
    """What a release is measured on, and what becomes of the verdict."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    device: str = Field("cpu", pattern="^(cpu|cuda)$", description="device that the release is for")
    limit: int | None = Field(16, ge=1, description="how many prompts; None takes all")
    max_tokens: int = Field(BENCH.max_tokens, ge=1, description="tokens to emit per prompt at most")
    all_strategies: bool = Field(False, description="also measure the other strategies, for a table")
    dry_run: bool = Field(False, description="keep nothing in the registry, and move no alias")
    unmeasured: str | None = Field(None, description="why a release may pass although the champion or traces cannot be measured here; "
                                   "kept with the verdict. None fails the gate then")


DEFAULTS = GateSettings()
