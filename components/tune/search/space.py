"""The search space: which configurations of the strategies a tuner may try.

Only parameters whose effect a trace or a short measurement can show are there; bounds lie within
those of the strategies' own configs, which a test checks. Ablations (without memory, without gate
…) are for benches, not for tuning.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftwell.serving.runtime.strategies import (
    STRATEGIES,
    StrategyChoice,
    StrategyResources,
    build_strategy,
    find_strategy,
)
from draftwell.serving.runtime.strategies.lossless.draft_lengths import VanillaSD
from draftwell.serving.runtime.strategies.lossless.pearl import Pearl
from draftwell.serving.runtime.strategies.lossless.spide import Spide

if TYPE_CHECKING:
    from draftwell.serving.artifacts.hardware_profile import HardwareProfile

Space = Mapping[str, Sequence[Any]]
"""Parameter → the values that may be tried."""


def steps(low: float, high: float, step: float) -> tuple[float, ...]:
    """Numbers from `low` to `high`, both included.

    >>> steps(0.1, 0.3, 0.1)
    (0.1, 0.2, 0.3)
    """
    return tuple(round(low + i * step, 6) for i in range(round((high - low) / step) + 1))


PYRAMID_LENGTHS, PYRAMID_TAUS = (1, 2, 3, 4, 5, 7, 10, 15, 20, 25), (0.2, 0.3, 0.4, 0.5)
"""The grid of PyramidSD, section 4.1 and Table 2: every l_D below every l_Q."""

REPLAYED: dict[str, Space] = {
    "vanilla_sd": {"num_speculative_tokens": range(1, 13)},
    "svip": {"threshold": steps(0.15, 0.6, 0.05), "max_draft": (8, 16, 40)},
    "draft_verify": {"threshold": (0.8, 0.3, 0.5, 0.7, 0.9), "max_draft": (4, 8, 16)},
    "adaedl": {"threshold": (0.5, 0.4, 0.6, 0.7, 0.8), "max_draft": (8, 4, 16)},
    "hf_dynamic": {
        "threshold": steps(0.2, 0.8, 0.1),
        "max_draft": (8, 20),
        "heuristic": (False, True),
    },
    "spide": {
        "tau": steps(0.1, 0.95, 0.05),
        "parallel": (False, True),
        # without one what is drafted meanwhile is bounded by one pass of the target
        "max_draft": (None, 4, 8, 16),
        "overlap_tau": (0.0, 0.05, 0.2),
    },
    "pearl": {"num_speculative_tokens": (None, *range(1, 9))},
    "prompt_lookup": {
        "max_matching_ngram_size": range(1, 5),
        "prompt_lookup_num_tokens": (3, 5, 10, 16),
    },
}
"""Strategies that a replay of a trace predicts exactly: lossless ones that read nothing but what a
trace holds (docs/add_a_strategy.md, "Replayed or measured")."""

MEASURED: dict[str, Space] = {
    # a trace holds no state along its rollouts
    "specdec_pp": {"threshold": steps(0.1, 0.9, 0.1), "max_draft": (5, 10, 20)},
    # the datastore is made of the traces that a replay reads, and would find every text in itself
    "suffix": {"alpha": (1.0, 2.0), "max_draft": (4, 8, 16), "max_branches": (1, 2)},
    "rest": {"max_nodes": (4, 8, 16), "max_depth": (4, 10)},
    "eagle3": {
        "num_speculative_tokens": range(1, 6),
        "top_k": (1, 2, 3),
        "tree_tokens": (3, 5, 7),
        "threshold": (0.0, 0.3, 0.5),
    },
    "hybrid": {"drafter": ("auto", "none"), "max_draft": (3, 8)},
    # a trace holds nothing that the target says after guesses, or with sublayers skipped
    "lookahead": {"window": (3, 5), "guesses": (2, 3)},
    "swift": {"threshold": (0.8, 0.5), "max_draft": (4, 8)},
    # nor any of the target's states
    "medusa": {"nodes": (2, 4, 8)},
    # None: the verifier's own
    "sprinter": {"tau": (None, 0.3, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9)},
    # a trace holds nothing that a draft says after guesses
    "double": {"passes": (None, 2, 4), "guess_tokens": (4, 10)},
    # a trace holds no drafts of several sequences
    "duo_decoding": {"max_sequences": (1, 8)},
    "csd": {
        "num_speculative_tokens": (2, 3, 4, 6, 8),
        "min_count": (1, 2, 3, 6),
        "tau": (0.01, 0.1, 0.2, 0.3, 0.5),
    },
    "fuzzy_sd": {"num_speculative_tokens": (3, 5, 7), "tau": (0.05, 0.1, 0.2, 0.3)},
    "mentored": {"num_speculative_tokens": (3, 5, 7), "budget": (0.05, 0.1, 0.2, 0.4)},
    "lossy_sd": {"num_speculative_tokens": (3, 5, 7), "tau": (0.3, 0.45, 0.6, 0.8)},
    "fly": {
        "num_speculative_tokens": (10, 15),
        "threshold": (0.05, 0.1, 0.3),
        "window": (3, 6),
    },
    "asd": {
        "num_speculative_tokens": (3, 5, 7),
        "budget": (4.0, 8.0),
        "gate": (0.1, 0.25, 0.5),
    },
    "pyramid_assisted": {
        "num_speculative_tokens": PYRAMID_LENGTHS,
        "num_draft_tokens": PYRAMID_LENGTHS,
        "tau_target": PYRAMID_TAUS,
    },
    "pyramid_fuzzy": {
        "num_speculative_tokens": PYRAMID_LENGTHS,
        "num_draft_tokens": PYRAMID_LENGTHS,
        "tau_target": PYRAMID_TAUS,
        "tau_qualifier": PYRAMID_TAUS,
    },
}
"""Strategies that are measured, because what a trace holds does not predict them."""


PUBLISHED: dict[str, Sequence[Mapping[str, Any]]] = dict.fromkeys(
    ("pyramid_assisted", "pyramid_fuzzy"),
    (
        {"num_draft_tokens": 5, "num_speculative_tokens": 20},
        {"num_draft_tokens": 3, "num_speculative_tokens": 25},
    ),
)
"""Settings that a paper found the fastest, which are tried before others of their strategy."""


def tunable() -> list[str]:
    """Names of the strategies that have a space: our own, then those of plug-ins."""
    return [*REPLAYED, *MEASURED, *(name for name, one in STRATEGIES.items() if one.search_space)]


def space_of(strategy: str) -> Space:
    """What may be tried of a strategy; a plug-in's says it itself."""
    return (REPLAYED | MEASURED).get(strategy) or find_strategy(strategy).search_space


def replayable(strategy: str, rollout: int, profile: HardwareProfile) -> list[StrategyChoice]:
    """Every choice of a replayed strategy whose drafts of fixed length lie within a trace's
    rollouts of this length."""
    return [
        choice for choice in combinations(strategy) if rollout_needed(choice, profile) <= rollout
    ]


def rollout_needed(choice: StrategyChoice, profile: HardwareProfile) -> int:
    """Length of rollout within which a draft of the choice always lies, whatever its first wrong
    token; 0: its drafts have no fixed length.

    Drafts that confidence ends have no such bound: where one is longer than a rollout, its replay
    reports that it is not exact.
    """
    strategy = build_strategy(
        choice.name, dict(choice.parameters), StrategyResources({profile.kind: profile})
    )
    config = strategy.config
    match strategy:
        case VanillaSD():
            return int(config.num_speculative_tokens)
        case Pearl():  # drafts gamma tokens behind gamma - 1 that are not verified yet
            return 2 * strategy.gamma() - 1
        case Spide() if config.parallel and not config.overlap_tau:
            # while the target verifies gamma tokens the draft makes up to gamma more
            times = profile.when(overlapping=True)
            return 2 * strategy.overlap_steps(times, strategy.most_unverified) - 1
    return 0


def grid(space: Space) -> list[dict[str, Any]]:
    """Every combination.

    >>> grid({"a": (1, 2), "b": (True,)})
    [{'a': 1, 'b': True}, {'a': 2, 'b': True}]
    """
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def completed(strategy: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """A point of a space as parameters: with those that follow from others, and without those that
    have no effect beside them."""
    parameters = dict(point)
    if strategy == "spide" and "overlap_tau" in point and not point["parallel"]:
        parameters["overlap_tau"] = 0.0  # a serial SPIDE has no continuation that it could end
    if strategy == "eagle3":  # a chain has no tree's tokens, and no threshold ends a tree
        parameters.pop("tree_tokens" if point.get("top_k", 1) == 1 else "threshold", None)
    if strategy.startswith("pyramid_"):  # the qualifier adds one token of its own to l_Q
        longest = max(1, point["num_speculative_tokens"] - 1)
        parameters["num_draft_tokens"] = min(point["num_draft_tokens"], longest)
    return parameters


def combinations(strategy: str) -> list[StrategyChoice]:
    """Every choice in a strategy's space that its own rules allow, once, with what follows filled
    in (`completed`)."""
    from pydantic import ValidationError

    cls = find_strategy(strategy)
    allowed: dict[StrategyChoice, None] = {}
    for point in grid(space_of(strategy)):
        choice = StrategyChoice(strategy, completed(strategy, point))
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
