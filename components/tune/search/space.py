"""The search space: which configurations of the strategies a tuner may try. Each strategy class
declares its own values.

Only parameters whose effect a trace or a short measurement can show are there; bounds lie within
those of the strategies' own configs, which a test checks. Ablations (without memory, without gate
…) are for benches, not for tuning.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.runtime.strategies import (
    STRATEGIES,
    StrategyChoice,
    StrategyResources,
    build_strategy,
    find_strategy,
)
from draftwell.serving.runtime.strategies.search_space import Space, Span

if TYPE_CHECKING:
    from draftwell.serving.artifacts.hardware_profile import HardwareProfile

REPLAYED: dict[str, Space] = {
    name: cls.search_space
    for name, cls in STRATEGIES.items()
    # an acceptance head reads the draft's states, which no trace holds along its rollouts
    if cls.search_space and cls.replayable and AcceptanceHead.kind not in cls.artifacts
}
"""Strategies that a trace predicts exactly."""
MEASURED: dict[str, Space] = {
    name: cls.search_space
    for name, cls in STRATEGIES.items()
    if cls.search_space and name not in REPLAYED
}
"""Strategies that are measured, because what a trace holds does not predict them."""


def replayable(strategy: str, rollout: int, profile: HardwareProfile) -> list[StrategyChoice]:
    """Every choice of a replayed strategy whose drafts of fixed length lie within a trace's
    rollouts of this length."""
    return [
        choice for choice in combinations(strategy) if rollout_needed(choice, profile) <= rollout
    ]


def rollout_needed(choice: StrategyChoice, profile: HardwareProfile) -> int:
    """Length of rollout within which a draft of fixed length always lies (see
    `Strategy.rollout_needed`)."""
    return build_strategy(
        choice.name, dict(choice.parameters), StrategyResources({profile.kind: profile})
    ).rollout_needed()


def grid(space: Space) -> list[dict[str, Any]]:
    """Every combination.

    >>> grid({"a": Span(1, 2), "b": (True,)})
    [{'a': 1, 'b': True}, {'a': 2, 'b': True}]
    """
    each = [part.values if isinstance(part, Span) else part for part in space.values()]
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*each)]


def combinations(strategy: str, space: Space | None = None) -> list[StrategyChoice]:
    """Every choice in a strategy's space that its own rules allow, once, with what follows filled
    in (`Strategy.completed`).

    Args:
        space: a part of it; None takes all.
    """
    from pydantic import ValidationError

    cls = find_strategy(strategy)
    allowed: dict[StrategyChoice, None] = {}
    for point in grid(cls.search_space if space is None else space):
        choice = StrategyChoice(strategy, cls.completed(point))
        with contextlib.suppress(ValidationError):
            cls.Config.model_validate(choice.parameters)
            allowed[choice] = None
    return list(allowed)


def nearest_default(strategy: str, allowed: Sequence[StrategyChoice]) -> StrategyChoice:
    """The choice that has most of the strategy's own values; of equal ones that which is nearest in
    the others."""
    fields = find_strategy(strategy).Config.model_fields

    def distance(choice: StrategyChoice) -> tuple[int, float]:
        others = [
            (value, fields[name].default)
            for name, value in choice.parameters.items()
            if value != fields[name].default
        ]
        numbers = [pair for pair in others if all(isinstance(one, int | float) for one in pair)]
        return len(others), sum(abs(value - default) for value, default in numbers)

    return min(allowed, key=distance)
