"""What a row of a table rests on: digests of the tuned config and of the artifacts that were in
use, and of their traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftwell.serving.runtime.strategies import StrategyResources, find_strategy

if TYPE_CHECKING:
    from draftwell.serving.artifacts.decoding_config import DecodingConfig


def origins(
    strategy: str, parameters: Mapping[str, Any], resources: StrategyResources
) -> dict[str, Any]:
    """Digests by which `draftwell release show` walks from a row back to the traces.

    Args:
        resources: what the strategy worked with; a tuned config among its artifacts counts where it
            is of just this strategy and these parameters.
    Returns:
        `artifacts`: kind → digest of the artifacts that the strategy used, None for one that was
            made on the spot and never
        kept; `config_digest`: of the tuned config; `trace_digest`: of the traces that the config,
        else the artifacts, were made from, None where these name none or several.
    """
    used = {
        kind: resources.artifacts[kind]
        for kind in find_strategy(strategy).reads()
        if kind in resources.artifacts
    }
    config: Any = resources.artifacts.get("decoding_config")
    if config is not None and (strategy, dict(parameters)) not in choices_of(config):
        config = None
    makers = [config] if config is not None else list(used.values())
    traces = {maker.provenance.trace_digest for maker in makers} - {None}
    return {
        "artifacts": {kind: artifact.digest for kind, artifact in used.items()},
        "config_digest": None if config is None else config.digest,
        "trace_digest": traces.pop() if len(traces) == 1 else None,
    }


def choices_of(config: DecodingConfig) -> list[tuple[str, dict[str, Any]]]:
    """Strategy and parameters of a tuned config's choices."""
    sampled = (
        [] if config.sampled is None else [(config.sampled.strategy, config.sampled.parameters)]
    )
    return [(config.strategy, config.parameters), *sampled]
