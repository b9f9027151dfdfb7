"""Decoding strategies: one small file each, listed in `catalogue.STRATEGIES`, sources in PAPERS.md."""

from serving.runtime.strategies.base import Strategy, StrategyConfig, StrategyResources
from serving.runtime.strategies.catalogue import STRATEGIES, build_strategy, describe, find_strategy

__all__ = ["STRATEGIES", "Strategy", "StrategyConfig", "StrategyResources", "build_strategy", "describe", "find_strategy"]
