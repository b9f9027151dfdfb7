"""A strategy pool over a table pair, without models to load."""

from __future__ import annotations

from typing import Any

from draftwell.serving.artifacts.decoding_config import DecodingConfig, SampledChoice
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy, find_strategy
from draftwell.serving.server.model.snapshots import SnapshotOrigin
from draftwell.serving.server.model.strategy_pool import StrategyPool
from tests.support.models.resources import ORIGIN, table_pair, table_resources

VOCAB = 8
SNAPSHOT_ORIGIN = SnapshotOrigin("table", 3, "d" * 64, "f" * 64)


class Pair:
    """The parts of a loaded pair that a pool uses."""

    def __init__(self, *roles: str):
        models = table_pair(VOCAB, noise=0.6)
        self.models = {role: models[role] for role in roles or ("target", "draft")}
        self.special_tokens = frozenset({VOCAB - 1})


def pool(
    strategy: str = "spide",
    mode: Any = "shared",
    *,
    parameters: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    pair: Pair | None = None,
    sampled: SampledChoice | None = None,
    draft_length_by_batch: dict[int, int] | None = None,
    **settings: Any,
) -> StrategyPool:
    """A pool whose bundle has an artifact of every kind but those in `without`; a lossless choice
    serves sampled requests, too."""
    artifacts = {
        kind: artifact
        for kind, artifact in table_resources(VOCAB).artifacts.items()
        if kind not in without
    }
    config = DecodingConfig(strategy, parameters or {}, {}, ORIGIN, sampled, draft_length_by_batch)
    if find_strategy(strategy).lossless:
        config = config.with_greedy_for_sampled()
    return StrategyPool(pair or Pair(), artifacts, config, None, mode, **settings)  # type: ignore[arg-type]


def decode(strategy: Strategy, prompt: int = 1, max_tokens: int = 60) -> Any:
    """Decode one prompt over the table pair."""
    return Engine(table_pair(VOCAB, noise=0.6)).generate(
        [prompt], Sampling(max_tokens=max_tokens), strategy
    )


def learn(it: StrategyPool, tenant: str | None = None) -> None:
    """Let a state of the pool learn from two requests."""
    for name in ("spide", "csd"):
        decode(it.get(name, tenant))
