"""Decoding strategies: one small class each, listed in `catalogue.STRATEGIES`, sources in
PAPERS.md."""

from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig, StrategyResources
from draftwell.serving.runtime.strategies.catalogue import (
    STRATEGIES,
    build_strategy,
    describe,
    find_strategy,
)
from draftwell.serving.runtime.strategies.choice import PLAIN, StrategyChoice, served_choice

__all__ = [
    "PLAIN",
    "STRATEGIES",
    "Strategy",
    "StrategyChoice",
    "StrategyConfig",
    "StrategyResources",
    "build_strategy",
    "describe",
    "find_strategy",
    "served_choice",
]
