"""What the tuner may try: for every strategy the parameters that matter and their values.

Only parameters whose effect a trace or a short measurement can tell apart are here; bounds lie within those of the
strategies' own configs, which a test checks. Ablations (without memory, without gate …) are for benches, not for tuning.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.runtime.strategies import find_strategy

if TYPE_CHECKING:
    from optuna import Trial


@dataclass(frozen=True)
class Span:
    """Numbers from `low` to `high`, both included, in steps."""

    low: float
    high: float
    step: float = 1

    @property
    def values(self) -> tuple[float, ...]:
        count = round((self.high - self.low) / self.step) + 1
        return tuple(self._plain(self.low + i * self.step) for i in range(count))

    @property
    def whole(self) -> bool:
        return all(float(number).is_integer() for number in (self.low, self.high, self.step))

    def _plain(self, value: float) -> float:
        return int(value) if self.whole else round(value, 6)


Space = dict[str, Span | tuple[Any, ...]]
"""Parameter → its values, as a range or one by one."""

REPLAYED: dict[str, Space] = {
    "vanilla_sd": {"num_speculative_tokens": Span(1, 12)},
    "spide": {"tau": Span(0.3, 0.95, 0.05), "parallel": (False, True), "max_draft": (4, 8, 16, 32)},
    "prompt_lookup": {"max_matching_ngram_size": Span(1, 4), "prompt_lookup_num_tokens": (3, 5, 10, 16)},
}
"""Lossless strategies, which a trace predicts exactly."""

MEASURED: dict[str, Space] = {
    "sprinter": {"tau": (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)},
    "csd": {"num_speculative_tokens": (4, 6, 8), "min_count": (3, 6, 12), "tau": (0.01, 0.05, 0.2)},
}
"""Lossy strategies: what they write depends on them, so they are measured."""


def space_of(strategy: str, rollout: int) -> Space:
    """The values of a replayed strategy; a fixed draft length is bounded by the trace's rollouts."""
    space = dict(REPLAYED[strategy])
    gamma = space.get("num_speculative_tokens")
    if isinstance(gamma, Span):
        space["num_speculative_tokens"] = Span(gamma.low, min(gamma.high, rollout), gamma.step)
    return space


def values_of(values: Span | tuple[Any, ...]) -> tuple[Any, ...]:
    return values.values if isinstance(values, Span) else values


def grid(space: Space) -> list[dict[str, Any]]:
    """Every combination.

    >>> grid({"a": Span(1, 2), "b": (True,)})
    [{'a': 1, 'b': True}, {'a': 2, 'b': True}]
    """
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*map(values_of, space.values()))]


def suggest(trial: Trial, space: Space) -> dict[str, Any]:
    """A combination that Optuna's sampler chooses."""
    chosen: dict[str, Any] = {}
    for name, values in space.items():
        if not isinstance(values, Span):
            chosen[name] = trial.suggest_categorical(name, values)
        elif values.whole:
            chosen[name] = trial.suggest_int(name, int(values.low), int(values.high), step=int(values.step))
        else:
            chosen[name] = round(trial.suggest_float(name, values.low, values.high, step=values.step), 6)
    return chosen


def defaults(strategy: str, space: Space) -> dict[str, Any]:
    """The strategy's own values of the parameters in a space, each moved to the nearest that the space has."""
    chosen = {}
    for name, values in space.items():
        own, known = find_strategy(strategy).Config.model_fields[name].default, values_of(values)
        if own in known:
            chosen[name] = own
        elif isinstance(own, int | float):
            chosen[name] = min(known, key=lambda value: abs(value - own))
        else:
            chosen[name] = known[0]
    return chosen


def some_of(strategy: str, count: int, seed: int) -> list[dict[str, Any]]:
    """At most `count` configs of a measured strategy: its defaults, then others at random."""
    space = MEASURED[strategy]
    first = defaults(strategy, space)
    others = [parameters for parameters in grid(space) if parameters != first]
    random.Random(seed).shuffle(others)
    return [first, *others][:count]
