"""Engine config: how another engine decodes a pair, as its tuning chose it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from draftwell.serving.artifacts.base import Artifact, Provenance


class EngineConfigFile(BaseModel):
    """What `engine.json` holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = Field(description="name of the engine, such as vllm")
    version: str = Field(description="of the engine that was measured")
    distribution: str | None = Field(description="that the engine is installed as; None: not known")
    dtype: str
    threads: int = Field(description="compute threads that were measured with")
    plugin: str | None = Field(
        description="version of our plug-in, where the settings name a class of it"
    )
    temperature: float = Field(description="of the requests that it was tuned for")
    label: str = Field(description="the choice as tables name it")
    settings: dict[str, Any] | None = Field(
        description="the engine's own speculative settings, a draft or head by the name of its "
        "folder; None: plain decoding"
    )
    exports: dict[str, Any] = Field(description="the same for other engines, by their names")
    subject: str = Field(description="digest of all that the choice depends on, but for time")
    choice: dict[str, Any] = Field(description="the tuning's choice, reason and figures")


class EngineConfig(Artifact):
    """How another engine decodes.

    Args:
        contents: what `engine.json` holds.
    """

    kind = "engine_config"

    def __init__(self, contents: EngineConfigFile, provenance: Provenance):
        self.contents, self.provenance = contents, provenance

    def write_files(self, folder: Path) -> None:
        text = json.dumps(self.contents.model_dump(mode="json"), indent=2) + "\n"
        (folder / "engine.json").write_text(text)

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        text = (folder / "engine.json").read_bytes()
        return cls(EngineConfigFile.model_validate_json(text), provenance)
