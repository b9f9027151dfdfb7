"""What the tuner may try: for every strategy the parameters that matter and their values.

Only parameters whose effect a trace or a short measurement can tell apart are here; bounds lie within those of the
strategies' own configs, which a test checks. Ablations (without memory, without gate …) are for benches, not for tuning.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.runtime.strategies import StrategyResources, build_strategy, find_strategy

if TYPE_CHECKING:
    from optuna import Trial

    from serving.artifacts.hardware_profile import HardwareProfile


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
    "svip": {"threshold": Span(0.15, 0.6, 0.05), "max_draft": (8, 16, 40)},
    "draft_verify": {"threshold": (0.8, 0.3, 0.5, 0.7, 0.9), "max_draft": (4, 8, 16)},
    "adaedl": {"threshold": (0.5, 0.4, 0.6, 0.7, 0.8), "max_draft": (8, 4, 16)},
    "hf_dynamic": {"threshold": Span(0.2, 0.8, 0.1), "max_draft": (8, 20), "heuristic": (False, True)},
    "spide": {"tau": Span(0.1, 0.95, 0.05), "parallel": (False, True), "max_draft": (4, 8, 16, 32), "overlap_tau": (0.0, 0.05, 0.2)},
    "pearl": {"num_speculative_tokens": (None, *range(1, 9))},
    "specdec_pp": {"threshold": Span(0.1, 0.9, 0.1), "max_draft": (5, 10, 20)},
    "prompt_lookup": {"max_matching_ngram_size": Span(1, 4), "prompt_lookup_num_tokens": (3, 5, 10, 16)},
}
"""Lossless strategies, which a trace predicts exactly."""

PYRAMID_LENGTHS, PYRAMID_TAUS = (1, 2, 3, 4, 5, 7, 10, 15, 20, 25), (0.2, 0.3, 0.4, 0.5)
"""The grid of PyramidSD, section 4.1; l_D is half of l_Q (see `combinations`)."""

MEASURED: dict[str, Space] = {
    "sprinter": {"tau": (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)},
    "duo_decoding": {"max_sequences": (1, 8)},
    "csd": {"num_speculative_tokens": (4, 6, 8), "min_count": (3, 6, 12), "tau": (0.01, 0.05, 0.2)},
    "fuzzy_sd": {"num_speculative_tokens": (3, 5, 7), "tau": (0.05, 0.1, 0.2, 0.3)},
    "mentored": {"num_speculative_tokens": (3, 5, 7), "budget": (0.05, 0.1, 0.2, 0.4)},
    "lossy_sd": {"num_speculative_tokens": (3, 5, 7), "tau": (0.3, 0.45, 0.6, 0.8)},
    "pyramid_assisted": {"num_speculative_tokens": PYRAMID_LENGTHS, "tau_target": PYRAMID_TAUS},
    "pyramid_fuzzy": {"num_speculative_tokens": PYRAMID_LENGTHS, "tau_target": PYRAMID_TAUS, "tau_qualifier": PYRAMID_TAUS},
}
"""Lossy strategies: what they write depends on them, so they are measured. So is DuoDecoding: a trace holds no drafts of several
sequences."""


def replayable(strategy: str, rollout: int, profile: HardwareProfile) -> list[dict[str, Any]]:
    """Every config of a replayed strategy whose drafts of fixed length lie within a trace's rollouts of this length."""
    return [parameters for parameters in combinations(strategy) if rollout_needed(strategy, parameters, profile) <= rollout]


def rollout_needed(strategy: str, parameters: Mapping[str, Any], profile: HardwareProfile) -> int:
    """Length of rollout within which a draft of fixed length always lies, whatever its first wrong token; 0 where nothing is fixed.

    PEARL drafts gamma tokens behind gamma − 1 that are not verified yet, hence 2·gamma − 1. So does SPIDE while the target verifies,
    unless `overlap_tau` ends that sooner: its gamma is what fits into a verification. Drafts that confidence ends have no such
    bound: where one runs on for too long, that replay says that it was not exact.
    """
    if strategy == "vanilla_sd":
        return int(parameters["num_speculative_tokens"])
    if strategy == "pearl":
        pearl: Any = build_strategy(strategy, dict(parameters), StrategyResources({profile.kind: profile}))
        return 2 * int(pearl.gamma()) - 1
    if strategy == "spide" and parameters["parallel"] and not parameters["overlap_tau"]:
        longest, times = int(parameters["max_draft"]), profile.when(overlapping=True)
        return 2 * min(longest, max(1, math.floor(times.verify_seconds(longest + 1) / times.t_draft))) - 1
    return 0


def space_of(strategy: str, rollout: int, profile: HardwareProfile) -> Space:
    """The values of a replayed strategy that some `replayable` config has."""
    configs = replayable(strategy, rollout, profile)
    return {name: bounded(values, {config[name] for config in configs}) for name, values in REPLAYED[strategy].items()}


def bounded(values: Span | tuple[Any, ...], allowed: set[Any]) -> Span | tuple[Any, ...]:
    """Those of the values that are allowed: a shorter range, or some of them.

    >>> bounded(Span(1, 12), {1, 2, 3}), bounded((None, 1, 2), {None, 1})
    (Span(low=1, high=3, step=1), (None, 1))
    """
    if isinstance(values, Span):
        return Span(min(allowed), max(allowed), values.step)
    return tuple(value for value in values if value in allowed)


def values_of(values: Span | tuple[Any, ...]) -> tuple[Any, ...]:
    return values.values if isinstance(values, Span) else values


def grid(space: Space) -> list[dict[str, Any]]:
    """Every combination.

    >>> grid({"a": Span(1, 2), "b": (True,)})
    [{'a': 1, 'b': True}, {'a': 2, 'b': True}]
    """
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*map(values_of, space.values()))]


def combinations(strategy: str, space: Space | None = None) -> list[dict[str, Any]]:
    """Every config in a strategy's space that its own rules allow, once, with what follows filled in (see `completed`).

    Args:
        space: a part of it; None takes all.
    """
    from pydantic import ValidationError

    allowed = {}
    for point in grid((REPLAYED | MEASURED)[strategy] if space is None else space):
        parameters = completed(strategy, point)
        with contextlib.suppress(ValidationError):
            find_strategy(strategy).Config.model_validate(parameters)
            allowed[key(parameters)] = parameters
    return list(allowed.values())


def completed(strategy: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters with those that are not searched but follow, and with those that have no effect at their default.

    PyramidSD's l_D is about half of l_Q; a serial SPIDE has no continuation for `overlap_tau` to end.
    """
    if "num_draft_tokens" in find_strategy(strategy).Config.model_fields:
        return parameters | {"num_draft_tokens": max(1, parameters["num_speculative_tokens"] // 2)}
    if "overlap_tau" in parameters and not parameters["parallel"]:
        return parameters | {"overlap_tau": 0.0}
    return parameters


def key(parameters: Mapping[str, Any]) -> str:
    """Parameters as text, whatever their order."""
    return json.dumps(dict(parameters), sort_keys=True)


def plain(space: Space) -> dict[str, list[Any]]:
    """A space as JSON."""
    return {name: list(values_of(values)) for name, values in space.items()}


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


def start(strategy: str, space: Space) -> dict[str, Any]:
    """The config that a search begins with: the defaults, with what follows filled in."""
    return completed(strategy, defaults(strategy, space))
