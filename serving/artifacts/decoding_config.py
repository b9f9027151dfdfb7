"""Decoding config: the tuned choice of strategy and parameters, with the evidence it rests on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from serving.artifacts.base import Artifact, Provenance


class DecodingConfig(Artifact):
    """A strategy by name, its parameters, and why it was chosen.

    Args:
        strategy: key of `STRATEGIES`.
        parameters: values for the strategy's pydantic config.
        evidence: trials and measurements with intervals, as plain JSON (shown to people, not read by the runtime).
    """

    kind = "decoding_config"

    def __init__(self, strategy: str, parameters: dict[str, Any], evidence: dict[str, Any], provenance: Provenance):
        self.strategy, self.parameters, self.evidence, self.provenance = strategy, parameters, evidence, provenance

    def write_files(self, folder: Path) -> None:
        (folder / "config.json").write_text(
            json.dumps({"strategy": self.strategy, "parameters": self.parameters, "evidence": self.evidence}, indent=2) + "\n")

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        return cls(**json.loads((folder / "config.json").read_text()), provenance=provenance)
