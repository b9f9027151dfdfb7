"""Decoding config: the tuned choices of strategy and parameters, with the evidence they rest on.

One choice is for greedy requests (temperature 0); another may be there for sampled ones. Each has
its longest draft by the number of requests that are decoded together, `draft_length_by_batch`:
requests in a batch → tokens, 0 where plain decoding is faster. Empty: it was not measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from draftwell.serving.artifacts.base import Artifact, Provenance
from draftwell.serving.temperature import SERVED_TEMPERATURE


def check_lengths(draft_length_by_batch: Mapping[int, int]) -> None:
    """Refuse a table of other things than batch sizes of 1 or more and lengths of 0 or more.

    Raises:
        ValueError: with both in its text.
    """
    for size, length in draft_length_by_batch.items():
        if not (isinstance(length, int) and size >= 1 and length >= 0):
            raise ValueError(
                "draft_length_by_batch needs requests (1 or more) and draft lengths (0 or more), "
                f"not {size} and {length!r}"
            )


@dataclass(frozen=True)
class SampledChoice:
    """What was tuned for sampled requests.

    Args:
        temperature: that it was tuned at, above 0; it serves all requests of the class.
        strategy, parameters, evidence, draft_length_by_batch: as in `DecodingConfig`.
    """

    temperature: float
    strategy: str
    parameters: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)
    draft_length_by_batch: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"a sampled choice needs a temperature above 0, not {self.temperature}"
            )
        check_lengths(self.draft_length_by_batch)


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
        draft_length_by_batch: Mapping[int, int] | None = None,
    ):
        self.strategy, self.parameters, self.evidence, self.provenance = (
            strategy,
            parameters,
            evidence,
            provenance,
        )
        self.sampled = sampled
        self.draft_length_by_batch = dict(draft_length_by_batch or {})
        check_lengths(self.draft_length_by_batch)

    def with_greedy_for_sampled(self) -> DecodingConfig:
        """The same with the greedy choice for sampled requests, too, unless something was tuned for
        them.

        For a greedy choice that is lossless and that the gate measured for sampled requests
        (`Manifest.sampled_as_greedy`).
        """
        if self.sampled is not None:
            return self
        table = self.draft_length_by_batch
        sampled = SampledChoice(SERVED_TEMPERATURE, self.strategy, self.parameters, {}, table)
        return self.with_sampled(sampled, self.provenance)

    def with_sampled(self, sampled: SampledChoice, provenance: Provenance) -> DecodingConfig:
        """The same choice for greedy requests, with another one for sampled ones."""
        return DecodingConfig(
            self.strategy,
            self.parameters,
            self.evidence,
            provenance,
            sampled,
            self.draft_length_by_batch,
        )

    def write_files(self, folder: Path) -> None:
        found = {
            "strategy": self.strategy,
            "parameters": self.parameters,
            "evidence": self.evidence,
            "draft_length_by_batch": self.draft_length_by_batch,
            "sampled": None if self.sampled is None else asdict(self.sampled),
        }
        (folder / "config.json").write_text(json.dumps(found, indent=2) + "\n")

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        found = json.loads((folder / "config.json").read_text())
        sampled = found.pop("sampled")
        for choice in (found, sampled or {}):
            table = choice.get("draft_length_by_batch", {})
            choice["draft_length_by_batch"] = {int(size): k for size, k in table.items()}
        return cls(
            **found,
            provenance=provenance,
            sampled=None if sampled is None else SampledChoice(**sampled),
        )
