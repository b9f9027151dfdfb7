"""The map, asked for a pair that was tuned: what would a device of its own for the draft give?"""

from __future__ import annotations

from collections.abc import Iterable

from draftwell.components.formulas import token_acceptance
from draftwell.components.regimes.speedups import LOSSLESS, METHODS, Pair, Placement, fastest
from draftwell.components.tune.evidence import OwnDevice, Trial
from draftwell.serving.artifacts.forward_costs import ascending
from draftwell.serving.artifacts.hardware_profile import HardwareProfile

CERTAIN = 0.999
"""Acceptance is taken as no more than that: at 1 a run of kept tokens has no end."""


def own_device(profile: HardwareProfile, trials: Iterable[Trial]) -> OwnDevice | None:
    """What a device as fast as this one would give if the draft had it to itself; None without a
    draft model, or without a replay of SD that says how often its tokens are kept."""
    alpha = acceptance_in(trials)
    if profile.t_draft is None or alpha is None:
        return None
    pair = pair_of(profile.t_draft, profile, alpha)
    method = fastest(pair, Placement.OWN)
    return OwnDevice(
        c=pair.c,
        acceptance=alpha,
        method=method,
        speedup=METHODS[method](pair, Placement.OWN),
        in_turn=max(METHODS[name](pair, Placement.IN_TURN) for name in LOSSLESS),
    )


def pair_of(t_draft: float, profile: HardwareProfile, alpha: float) -> Pair:
    """A pair's passes in units of one plain token, the time outside passes in each round."""
    times = ascending(profile.t_verify)
    token = times[1] + profile.t_rest
    verify = {size: (seconds + profile.t_rest) / token for size, seconds in times.items()}
    return Pair(t_draft / token, alpha, verify)


def acceptance_in(trials: Iterable[Trial]) -> float | None:
    """Chance that SD keeps a token: that at which its rounds are as long as in the fastest of its
    replays, which are exact counts; None without one."""
    found = [
        trial
        for trial in trials
        if trial.strategy == "vanilla_sd" and trial.exact and not trial.was_measured
    ]
    if not found:
        return None
    best = min(found, key=lambda trial: trial.seconds)
    gamma = int(best.parameters["num_speculative_tokens"])
    kept = 1 / best.target_calls_per_token - 1
    return min(CERTAIN, token_acceptance(min(float(gamma), max(0.0, kept)), gamma))
