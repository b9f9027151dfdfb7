"""A stand-in for measurement: configs whose true speeds a test sets, with noise of its own on every
prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.evaluator import Measured
from draftwell.serving.runtime.strategies import StrategyChoice

TOKENS = 16
CALLS = {"autoregressive": 16}


class Clock:
    """Measures by a table of speedups; remembers what it was asked.

    Args:
        speedups: strategy → times as fast as plain decoding, or a function of the choice; what is
            not named is half as fast.
        noise: a share; every prompt's seconds are up to so much too long or too short.
        die_at: the call, counted from 1, in which it is interrupted.
    """

    def __init__(
        self,
        speedups: Mapping[str, float] | Callable[[StrategyChoice], float],
        noise: float = 0.0,
        seed: int = 1,
        die_at: int | None = None,
    ):
        self.speed = (
            speedups if callable(speedups) else lambda config: speedups.get(config.name, 0.5)
        )
        self.noise, self.die_at, self.rng = noise, die_at, random.Random(seed)
        self.calls: list[tuple[list[StrategyChoice], list[str], bool]] = []

    def __call__(
        self,
        configs: Sequence[StrategyChoice],
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None = None,
        fresh: bool = False,
    ) -> list[Measured]:
        self.calls.append((list(configs), [prompt.id for prompt in prompts], fresh))
        if len(self.calls) == self.die_at:
            raise KeyboardInterrupt
        return [
            Measured(
                [
                    10.0 / self.speed(config) * (1 + self.rng.uniform(-self.noise, self.noise))
                    for _ in prompts
                ],
                [[0] * TOKENS for _ in prompts],
                [CALLS.get(config.name, 10)] * len(prompts),
            )
            for config in configs
        ]

    @property
    def asked(self) -> list[StrategyChoice]:
        """Every config that was ever measured, once, in order."""
        found: list[StrategyChoice] = []
        for configs, _, _ in self.calls:
            found += [config for config in configs if config not in found]
        return found


def gamma(config: StrategyChoice, default: Any = 0) -> Any:
    return config.parameters.get("num_speculative_tokens", default)
