"""Replays of sampled texts, repeated for several random draws: what a strategy does on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from draftwell.components.replay.replay import ReplayResult, replay_strategy
from draftwell.components.replay.sampled import SampledTexts, read_sampled
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import StrategyResources

COUNTERS = tuple(field.name for field in fields(Stats) if field.type == "int")


@dataclass(frozen=True)
class ExpectedReplay:
    """A strategy replayed on sampled texts, several times.

    Args:
        runs: the replays, one for each seed.
        mean: counter → mean over the replays of its total over all texts; also
            "predicted_seconds_per_token".
        error: the standard error of each mean over the random draws (other texts would differ too);
            NaN for one seed.
    """

    runs: list[ReplayResult]
    mean: dict[str, float]
    error: dict[str, float]

    @property
    def exact(self) -> bool:
        """False where a draft ran past the end of a rollout."""
        return all(run.exact for run in self.runs)


def replay_expected(
    trace: TraceSet | SampledTexts,
    strategy_name: str,
    parameters: Mapping[str, Any],
    resources: StrategyResources,
    profile: HardwareProfile,
    *,
    seeds: Sequence[int] = range(4),
    max_tokens: int | None = None,
    extend: bool = False,
) -> ExpectedReplay:
    """Run a strategy over sampled texts, once for each seed of the random draws.

    Args:
        seeds: one replay for each, at least one.
        resources, profile, max_tokens, extend: as in `replay_strategy`.
    Raises:
        TraceError: as in `read_sampled`.
        DraftwellError, RolloutExhausted: no seed (`no_seeds`), or as in `replay_strategy`.
    """
    if not seeds:
        raise DraftwellError("there is no seed to replay with: name at least one", code="no_seeds")
    texts = trace if isinstance(trace, SampledTexts) else read_sampled(trace)
    runs = [
        replay_strategy(
            texts.draw(seed),
            strategy_name,
            parameters,
            resources,
            profile,
            max_tokens=max_tokens,
            extend=extend,
        )
        for seed in seeds
    ]
    values = {name: [float(getattr(run.stats, name)) for run in runs] for name in COUNTERS}
    values["predicted_seconds_per_token"] = [run.predicted_seconds_per_token for run in runs]
    mean = {name: float(np.mean(found)) for name, found in values.items()}
    error = {
        name: float(np.std(found, ddof=1) / len(runs) ** 0.5) if len(runs) > 1 else float("nan")
        for name, found in values.items()
    }
    return ExpectedReplay(runs, mean, error)
