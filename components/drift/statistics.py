"""Tests by prompt: is the difference between two sets of prompts more than chance?

Tokens of one prompt are alike (a translation is easy or hard as a whole), so a test that takes them
for independent raises false alarms by the dozen. Here whole prompts are exchanged: every figure is
computed from sums over prompts, and its value is compared with those under random exchanges of
prompts between the two sets (a permutation test; Good, Permutation Tests, 2000). Where both sets
are drawn from the same traffic, p is at most α with a probability of at most α, whatever the figure
and however small the sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Measure = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Sums of the reference and of the feedback, `[..., width]` each → figure `[...]`; the larger, the
further apart they are."""
CHUNK = 500
"""Exchanges that are computed at once."""


@dataclass(frozen=True)
class Exchanged:
    """A figure and what chance alone gives.

    Args:
        value: of the two sets as they are.
        chance: its median over random exchanges.
        p_value: share of exchanges, the real one among them, whose figure is at least as large.
    """

    value: float
    chance: float
    p_value: float


def exchange(then: np.ndarray, now: np.ndarray, measure: Measure, *, resamples: int) -> Exchanged:
    """A figure of two sets of prompts, with its permutation test.

    Args:
        then, now: `[prompts, width]` sums over each prompt's positions.
        resamples: random exchanges; p is at least 1 / (resamples + 1).
    """
    from scipy.stats import permutation_test

    pooled = np.concatenate([then, now])
    total = pooled.sum(0)

    def figure(others: np.ndarray, chosen: np.ndarray, axis: int) -> np.ndarray:
        sums = pooled[chosen].sum(-2)
        return measure(total - sums, sums)

    places = np.arange(len(pooled))
    found = permutation_test(
        (places[: len(then)], places[len(then) :]),
        figure,
        vectorized=True,
        alternative="greater",
        n_resamples=resamples,
        batch=CHUNK,
        rng=np.random.default_rng(0),
    )
    chance = float(np.median(found.null_distribution))
    return Exchanged(float(found.statistic), chance, float(found.pvalue))


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole; 0 where there is no whole."""
    found: np.ndarray = np.divide(
        part, whole, out=np.zeros(np.broadcast_shapes(part.shape, whole.shape)), where=whole > 0
    )
    return found


def stability_index(then: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Population stability index Σ (now − then) · ln(now / then) of counts `[..., bins]`; half a
    count is added to every bin."""
    a, b = (
        (counts + 0.5) / (counts.sum(-1, keepdims=True) + 0.5 * counts.shape[-1])
        for counts in (then, now)
    )
    found: np.ndarray = ((b - a) * np.log(b / a)).sum(-1)
    return found


def rate_rise(then: np.ndarray, now: np.ndarray) -> np.ndarray:
    """By how much a share rose; sums `[..., 2]` of part and whole."""
    found: np.ndarray = share(now[..., 0], now[..., 1]) - share(then[..., 0], then[..., 1])
    return found


def rate_change(then: np.ndarray, now: np.ndarray) -> np.ndarray:
    """How far a share moved, in either direction; sums `[..., 2]` of part and whole."""
    return np.abs(rate_rise(then, now))


def table_error(prior: np.ndarray, weights: tuple[float, float]) -> Measure:
    """How far a table of shares by bin is off on the other set: Σ over bins of its share of tokens
    times |α now − α then|.

    Args:
        prior: `[bins]` share that an empty bin is taken for.
        weights: tokens that this prior counts for, then and now, as in `AcceptanceTable.alpha`.
    Returns:
        a measure of sums `[..., 2 · bins]`: kept in each bin, then judged in each.
    """
    bins = len(prior)

    def measure(then: np.ndarray, now: np.ndarray) -> np.ndarray:
        rates = [
            (sums[..., :bins] + weight * prior) / (sums[..., bins:] + weight)
            for sums, weight in zip((then, now), weights, strict=True)
        ]
        judged = now[..., bins:]
        found: np.ndarray = (
            share(judged, judged.sum(-1, keepdims=True)) * np.abs(rates[1] - rates[0])
        ).sum(-1)
        return found

    return measure


def calibration_error(sums: np.ndarray) -> np.ndarray:
    """Expected calibration error of sums `[..., 3 · bins]`: positions, scores and labels in each
    bin of the score."""
    count, score, label = np.split(sums, 3, axis=-1)
    found: np.ndarray = share(np.abs(score - label).sum(-1), count.sum(-1))
    return found


def calibration_rise(then: np.ndarray, now: np.ndarray) -> np.ndarray:
    """By how much the expected calibration error rose."""
    return calibration_error(now) - calibration_error(then)
