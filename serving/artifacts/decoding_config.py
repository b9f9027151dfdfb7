"""Decoding config: the tuned choices of strategy and parameters, with the evidence they rest on.

One choice is for greedy requests (temperature 0); another may be there for sampled ones.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from draftwell.serving.artifacts.base import Artifact, Provenance
from draftwell.serving.temperature import SERVED_TEMPERATURE


@dataclass(frozen=True)
class SampledChoice:
    """What was tuned for sampled requests.

    Args:
        temperature: that it was tuned at, above 0; it serves all requests of the class.
        strategy, parameters, evidence: as in `DecodingConfig`.
    """

    temperature: float
    strategy: str
    parameters: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"a sampled choice needs a temperature above 0, not {self.temperature}"
            )


class DecodingConfig(Artifact):
    """Strategies by name, their parameters, and why they were chosen.

    Args:
        strategy: key of `STRATEGIES`, for greedy requests.
        parameters: values for the strategy's pydantic config.
        evidence: trials and measurements with intervals, as plain JSON (shown to people, not read
            by the runtime).
        sampled: the choice for sampled requests; None where none was tuned (`served_choice` says
            what serves them then).
    """

    kind = "decoding_config"
    schema_version = 2

    def __init__(
        self,
        strategy: str,
        parameters: dict[str, Any],
        evidence: dict[str, Any],
        provenance: Provenance,
        sampled: SampledChoice | None = None,
    ):
        self.strategy, self.parameters, self.evidence, self.provenance = (
            strategy,
            parameters,
            evidence,
            provenance,
        )
        self.sampled = sampled

    def with_greedy_for_sampled(self) -> DecodingConfig:
        """The same with the greedy choice for sampled requests, too, unless something was tuned for
        them.

        For a greedy choice that is lossless and that the gate measured for sampled requests
        (`Manifest.sampled_as_greedy`).
        """
        if self.sampled is not None:
            return self
        sampled = SampledChoice(SERVED_TEMPERATURE, self.strategy, self.parameters)
        return DecodingConfig(
            self.strategy, self.parameters, self.evidence, self.provenance, sampled
        )

    def write_files(self, folder: Path) -> None:
        found = {
            "strategy": self.strategy,
            "parameters": self.parameters,
            "evidence": self.evidence,
            "sampled": None if self.sampled is None else asdict(self.sampled),
        }
        (folder / "config.json").write_text(json.dumps(found, indent=2) + "\n")

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        found = json.loads((folder / "config.json").read_text())
        sampled = found.pop("sampled")
        return cls(
            **found,
            provenance=provenance,
            sampled=None if sampled is None else SampledChoice(**sampled),
        )
