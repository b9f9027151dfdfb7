"""Intervals for ratios of speed, by a paired bootstrap over prompts.

Prompts differ far more than strategies do (a translation and a repetition of the prompt are worlds apart), so both
sides of a ratio are always resampled with the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serving.runtime.types import DraftwellError


def paired_bootstrap_ratio(seconds_a: Sequence[float], tokens_a: Sequence[int], seconds_b: Sequence[float],
                           tokens_b: Sequence[int], *, resamples: int = 2000, tail: float = 0.05,
                           seed: int = 0) -> tuple[float, float, float]:
    """How many times as fast b is as a, with a bootstrap interval.

    The ratio is (Σ seconds_a / Σ tokens_a) / (Σ seconds_b / Σ tokens_b): seconds per token of a over those of b, so
    that with a = autoregressive it is METHODS' speedup of b. Above 1, b is the faster one.

    Args:
        seconds_a, tokens_a, seconds_b, tokens_b: one entry a prompt, the same prompts in the same order.
        resamples: bootstrap resamples of the prompts.
        tail: probability left out at **each** end: `low` is a one-sided bound at this level.
    Returns:
        (ratio, low, high), the percentile interval.
    Raises:
        DraftwellError: no prompts, lengths that differ, a prompt without seconds or tokens, values that are not finite.

    >>> paired_bootstrap_ratio([2.0, 4.0], [10, 20], [1.0, 2.0], [10, 20])
    (2.0, 2.0, 2.0)
    """
    table = _table(seconds_a, tokens_a, seconds_b, tokens_b)
    drawn = np.random.default_rng(seed).integers(0, table.shape[1], size=(resamples, table.shape[1]))
    low, high = np.quantile(_ratio(table[:, drawn].sum(-1)), [tail, 1 - tail])
    return float(_ratio(table.sum(-1))), float(low), float(high)


def expanded_tail(tail: float, prompts: int) -> float:
    """The tail to ask of a percentile bootstrap so that, with few prompts, hardly more than `tail` lies beyond its bound.

    A resample of n prompts varies by sqrt((n − 1)/n) as much as prompts do, and takes their spread for known; Student's t
    mends both: Φ(−sqrt(n/(n − 1))·t(1 − tail; n − 1)) (the expanded percentile interval, Hesterberg 2015, section 4.2).

    Args:
        tail: wanted, in (0, 0.5).
        prompts: that are resampled; of a single one nothing can be known, and `tail` comes back as it is.
    """
    if prompts < 2:
        return tail
    from scipy.stats import norm, t

    return float(norm.cdf(-((prompts / (prompts - 1)) ** 0.5) * t.ppf(1 - tail, prompts - 1)))


def _table(*columns: Sequence[float]) -> np.ndarray:
    """`[4, prompts]` float64, checked."""
    if len({len(column) for column in columns}) != 1:
        counts = [len(column) for column in columns]
        raise DraftwellError(f"a paired comparison needs the same prompts on both sides, not {counts} entries")
    table = np.array(columns, dtype=np.float64)
    if table.shape[1] == 0:
        raise DraftwellError("a comparison needs at least one measured prompt")
    if not np.isfinite(table).all() or (table <= 0).any():
        raise DraftwellError("every measured prompt needs positive seconds and at least one token: measure again")
    return table


def _ratio(sums: np.ndarray) -> np.ndarray:
    """`[4, ...]` sums of seconds and tokens of both sides → speed of b over a."""
    return (sums[0] / sums[1]) / (sums[2] / sums[3])
