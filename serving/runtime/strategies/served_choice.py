"""Which of a tuned config's choices serves a request."""

from __future__ import annotations

from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.runtime.strategies.choice import PLAIN, StrategyChoice
from draftwell.serving.temperature import class_of


def served_choice(config: DecodingConfig, temperature: float) -> StrategyChoice:
    """The choice for requests of a temperature.

    Where none was tuned for sampled requests, they are decoded plainly: nothing is chosen over
    plain decoding whose speed was not measured, and the greedy choice was measured at temperature
    0. One that the gate found fast enough for them stands in the config that a server reads
    (`DecodingConfig.with_greedy_for_sampled`).
    """
    if class_of(temperature) == "greedy":
        return StrategyChoice(config.strategy, config.parameters)
    return (
        PLAIN
        if config.sampled is None
        else StrategyChoice(config.sampled.strategy, config.sampled.parameters)
    )
