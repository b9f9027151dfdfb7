"""Decoding strategies: one small file each, listed in `catalogue.STRATEGIES`, sources in
PAPERS.md."""

from serving.runtime.strategies.base import Strategy, StrategyConfig, StrategyResources
from serving.runtime.strategies.catalogue import STRATEGIES, build_strategy, describe, find_strategy
from serving.runtime.strategies.choice import PLAIN, StrategyChoice
from serving.runtime.strategies.served_choice import served_choice

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
