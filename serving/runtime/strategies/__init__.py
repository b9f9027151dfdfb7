"""Decoding strategies: one small file each, listed in `catalogue.STRATEGIES`, sources in PAPERS.md."""

from serving.runtime.strategies.base import Kit, Strategy, StrategyConfig
from serving.runtime.strategies.catalogue import STRATEGIES, build_strategy, describe, find_strategy

__all__ = ["STRATEGIES", "Kit", "Strategy", "StrategyConfig", "build_strategy", "describe", "find_strategy"]
