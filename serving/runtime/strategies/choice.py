"""A strategy with the parameters that differ from its defaults, used wherever one is named with
settings; and which of a tuned config's choices serves a request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.temperature import class_of


@dataclass(frozen=True, eq=False)
class StrategyChoice:
    """Which strategy decodes, and with which parameters. Choices are equal where `key` is.

    Args:
        name: a name of `STRATEGIES`.
        parameters: those that are set, as plain JSON; all others keep the strategy's defaults.
        draft_length_by_batch: what was measured of it under load (`Strategy`); empty: nothing.

    >>> choice = StrategyChoice("spide", {"tau": 0.6})
    >>> str(choice), choice.key, choice == StrategyChoice.from_json(choice.to_json())
    ('spide(tau=0.6)', 'spide {"tau": 0.6}', True)
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    draft_length_by_batch: Mapping[int, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name and parameters as text, whatever the order of the parameters."""
        return f"{self.name} {json.dumps(dict(self.parameters), sort_keys=True)}"

    def __str__(self) -> str:
        """For people: the name, with the parameters that are set."""
        settings = ", ".join(f"{name}={value}" for name, value in sorted(self.parameters.items()))
        return f"{self.name}({settings})" if settings else self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StrategyChoice) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def to_json(self) -> dict[str, Any]:
        """As reports and evidence hold it: `strategy` and `parameters`."""
        return {"strategy": self.name, "parameters": dict(self.parameters)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StrategyChoice:
        """The choice that a row of a report or of evidence holds."""
        return cls(row["strategy"], dict(row.get("parameters") or {}))


PLAIN = StrategyChoice("autoregressive")
"""Plain decoding, which every other choice is measured against."""


def served_choice(config: DecodingConfig, temperature: float) -> StrategyChoice:
    """The choice for requests of a temperature.

    Where none was tuned for sampled requests, they are decoded plainly: nothing is chosen over
    plain decoding whose speed was not measured, and the greedy choice was measured at temperature
    0. One that the gate found fast enough for them stands in the config that a server reads
    (`DecodingConfig.with_greedy_for_sampled`).
    """
    tuned = config if class_of(temperature) == "greedy" else config.sampled
    if tuned is None:
        return PLAIN
    return StrategyChoice(tuned.strategy, tuned.parameters, tuned.draft_length_by_batch)
