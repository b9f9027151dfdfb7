"""Which of a tuned config's choices serves a request."""

from __future__ import annotations

from serving.artifacts.decoding_config import DecodingConfig
from serving.runtime.strategies.catalogue import find_strategy
from serving.runtime.strategies.choice import PLAIN, StrategyChoice
from serving.temperature import class_of


def served_choice(config: DecodingConfig, temperature: float) -> StrategyChoice:
    """The choice for requests of a temperature.

    Where none was tuned for sampled requests, they get the greedy one if it is lossless: it then writes what the target would, at a speed
    that nobody measured. A lossy one, whose quality was measured at temperature 0 only, gives way to plain decoding.
    """
    greedy = StrategyChoice(config.strategy, config.parameters)
    if class_of(temperature) == "greedy":
        return greedy
    if config.sampled is not None:
        return StrategyChoice(config.sampled.strategy, config.sampled.parameters)
    return greedy if find_strategy(greedy.name).lossless else PLAIN
