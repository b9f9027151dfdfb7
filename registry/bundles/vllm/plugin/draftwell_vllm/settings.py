"""What a proposer may be told besides vLLM's own settings: the key `draftwell` of
`--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

KEY = "draftwell"


class ProposerSettings(BaseModel):
    """Settings of a proposer."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tau: float | None = Field(None, ge=0, le=1, description="SPIDE's; None takes the rule's own")
    threshold: float | None = Field(
        None, ge=0, le=2, description="of SVIP and of dynamic speculation; None: the rule's own"
    )
    draft: str | None = Field(
        None, description="folder of a draft model, asked where the text says nothing"
    )
    table: str | None = Field(
        None, description="`table.json` of an acceptance table of that draft model, for SPIDE"
    )


def read_settings(additional_config: Any) -> ProposerSettings:
    """The settings in vLLM's additional config.

    Raises:
        ValueError: an unknown key, or a value out of range; one line that names it.
    """
    found = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    try:
        return ProposerSettings.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"additional config, {KEY}: {place} is {first['input']!r}: {first['msg']}"
        ) from error
