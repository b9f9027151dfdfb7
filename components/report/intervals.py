"""Intervals for ratios of speed, by a paired bootstrap over prompts.

Prompts differ far more than strategies do (a translation and a repetition of the prompt are worlds
apart), so both sides of a ratio are always resampled with the same prompts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from draftwell.serving.errors import DraftwellError

TAIL = 0.05
"""Probability left out at each end of the intervals of gate, bench, tuner and papers; reports of
drift and verifiers leave out half of it, and hold 95 %."""
FEWEST_RESAMPLES, MOST_RESAMPLES = 2000, 200_000
FEWEST_PROMPTS = 8
"""Of a comparison that decides for something over plain decoding. A bootstrap knows no slower
prompt than those it has: of n prompts on which chance decides, all n are faster once in 2ⁿ times,
and then so is every resample."""
FEWEST_RUNS = 3
"""Of each side where whole runs are compared: two have hardly a spread of their own."""
BEYOND = 50
"""Resamples that should be beyond a bound: with fewer than tens a far quantile is mostly chance."""


def resample(prompts: int, resamples: int, seed: int, *, counts: bool = False) -> np.ndarray:
    """Bootstrap resamples of prompts, drawn with replacement: the only place that draws them.

    Args:
        counts: how often each prompt was drawn, instead of which ones were (another stream of
            random numbers).
    Returns:
        `[resamples, prompts]`: int64 indices of prompts, or float64 counts that add up to `prompts`
        in each row.
    """
    rng = np.random.default_rng(seed)
    if counts:
        return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples).astype(
            np.float64
        )
    return rng.integers(0, prompts, size=(resamples, prompts))


def percentile_ends(values: np.ndarray, tail: float) -> np.ndarray:
    """Low and high ends `[2, ...]` of values over resamples `[resamples, ...]`, `tail` left out at
    each end; NaN where all are NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of NaN alone
        ends: np.ndarray = np.nanquantile(values, [tail, 1 - tail], axis=0)
    return ends


def bootstrap_of_sums(
    sums: np.ndarray,
    measure: Callable[[np.ndarray], np.ndarray],
    *,
    resamples: int,
    tail: float = TAIL / 2,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Low and high ends of metrics of sums over prompts `[prompts, width]`: the percentile
    bootstrap.

    Args:
        measure: sums `[resamples, width]` → metrics `[resamples, metrics]`; NaN where there is
            nothing to measure.
    """
    low, high = percentile_ends(
        measure(resample(len(sums), resamples, seed, counts=True) @ sums), tail
    )
    return low, high


def paired_bootstrap_ratio(
    seconds_a: Sequence[float],
    tokens_a: Sequence[int],
    seconds_b: Sequence[float],
    tokens_b: Sequence[int],
    *,
    resamples: int | None = None,
    tail: float = TAIL,
    seed: int = 0,
) -> tuple[float, float, float]:
    """How many times as fast b is as a, with a bootstrap interval.

    The ratio is (Σ seconds_a / Σ tokens_a) / (Σ seconds_b / Σ tokens_b): seconds per token of a
    over those of b, so that with a = autoregressive it is the speedup of b (docs/methods.md). Above
    1, b is the faster one.

    Args:
        seconds_a, tokens_a, seconds_b, tokens_b: one entry a prompt, the same prompts in the same
            order.
        resamples: bootstrap resamples of the prompts; None takes as many as the tail needs
            (`resamples_for`).
        tail: probability left out at **each** end: `low` is a one-sided bound at this level.
    Returns:
        (ratio, low, high), the percentile interval.
    Raises:
        DraftwellError: no prompts, lengths that differ, a prompt without seconds or tokens, values
            that are not finite.

    >>> paired_bootstrap_ratio([2.0, 4.0], [10, 20], [1.0, 2.0], [10, 20])
    (2.0, 2.0, 2.0)
    """
    table = _table(seconds_a, tokens_a, seconds_b, tokens_b)
    prompts = table.shape[1]
    drawn = resample(prompts, resamples or resamples_for(tail, prompts), seed)
    low, high = percentile_ends(_ratio(table[:, drawn].sum(-1)), tail)
    return float(_ratio(table.sum(-1))), float(low), float(high)


class Timed(Protocol):
    """What was decoded: seconds and tokens of each prompt, in order."""

    @property
    def seconds(self) -> list[float]: ...

    @property
    def tokens(self) -> list[int]: ...


class Ratio(NamedTuple):
    """Times as fast as something else, with the ends of the interval."""

    ratio: float
    low: float
    high: float


def ratio_of(base: Timed, other: Timed, tail: float = TAIL, seed: int = 0) -> Ratio:
    """How many times as fast `other` is as `base` on the same prompts: the interval of every
    comparison of speed, `paired_bootstrap_ratio` made wider for few prompts.

    In simulations of skewed speedups (5 % wanted) its lower end lay above the truth with 12, 10, 7
    and 8 % of the draws of 4, 8, 12 and 24 prompts; scipy's BCa bootstrap had 20, 13, 8 and 8 %.
    """
    wider = expanded_tail(tail, len(base.seconds))
    return Ratio(
        *paired_bootstrap_ratio(
            base.seconds, base.tokens, other.seconds, other.tokens, tail=wider, seed=seed
        )
    )


def ratio_of_runs(base: Sequence[float], other: Sequence[float], tail: float = TAIL) -> Ratio:
    """How many times as fast runs are as others on the same prompts, by the speeds of whole runs:
    the ratio of geometric means, with Welch's interval of the logarithms.

    It says nothing of other prompts, which differ far more than runs do.

    Args:
        base, other: speeds above 0, at least two of each.

    >>> found = ratio_of_runs([10.0, 11.0, 12.0], [20.0, 22.0, 24.0])
    >>> [round(value, 2) for value in found]
    [2.0, 1.71, 2.34]
    """
    logs = [np.log(np.asarray(speeds, np.float64)) for speeds in (base, other)]
    errors = [one.var(ddof=1) / len(one) for one in logs]
    difference, half = float(logs[1].mean() - logs[0].mean()), 0.0
    if (error := sum(errors)) > 0:
        weights = (part**2 / (len(one) - 1) for part, one in zip(errors, logs, strict=True))
        half = student_reach(error, error**2 / sum(weights), tail)
    low, ratio, high = np.exp([difference - half, difference, difference + half])
    return Ratio(float(ratio), float(low), float(high))


def student_reach(variance: float, freedom: float, tail: float = TAIL) -> float:
    """Half the width of Student's t interval of an estimate, `tail` left out at each end.

    >>> round(student_reach(4.0, 9), 3)
    3.666
    """
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(freedom, 1 - tail) * variance**0.5)


def jackknife(
    estimate: Callable[[np.ndarray], np.ndarray], columns: np.ndarray
) -> tuple[float, float]:
    """A metric of the sums of `[columns, prompts]`, and its jackknife variance; NaN where it is
    undefined without one of the prompts."""
    sums, prompts = columns.sum(-1), columns.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        complete, without = estimate(sums), estimate(sums[:, None] - columns)
        spread = ((without - without.mean()) ** 2).sum()
    return float(complete), float((prompts - 1) / prompts * spread)


def resamples_for(tail: float, prompts: int) -> int:
    """Resamples of which `BEYOND` are beyond a bound that leaves out `tail`.

    One resample in nⁿ is n times the most extreme of n prompts: where the tail is smaller than
    that, no bound is further out, and more resamples would find nothing. At most `MOST_RESAMPLES`:
    six prompts or more with a tail below .00025.

    >>> [resamples_for(tail, prompts) for tail, prompts in ((0.05, 8), (0.0025, 8), (1e-9, 2))]
    [2000, 20000, 2000]
    """
    wanted = BEYOND / max(tail, float(prompts) ** -prompts)
    return round(min(MOST_RESAMPLES, max(FEWEST_RESAMPLES, wanted)))


def expanded_tail(tail: float, prompts: int) -> float:
    """The tail to ask of a percentile bootstrap so that, with few prompts, hardly more than `tail`
    is beyond its bound.

    A resample of n prompts varies by sqrt((n − 1)/n) as much as prompts do, and takes their spread
    as known; Student's t corrects both: Φ(−sqrt(n/(n − 1))·t(1 − tail; n − 1)) (the expanded
    percentile interval, Hesterberg 2015, section 4.2).

    Args:
        tail: wanted, in (0, 0.5).
        prompts: that are resampled; of a single one nothing can be known, and `tail` comes back as
            it is.
    """
    if prompts < 2:
        return tail
    from scipy.special import ndtr

    return float(ndtr(-student_reach(prompts / (prompts - 1), prompts - 1, tail)))


def _table(*columns: Sequence[float]) -> np.ndarray:
    """`[4, prompts]` float64, checked."""
    if len({len(column) for column in columns}) != 1:
        counts = [len(column) for column in columns]
        raise DraftwellError(
            f"a paired comparison needs the same prompts on both sides, not {counts} entries",
            code="unpaired_prompts",
        )
    table = np.array(columns, dtype=np.float64)
    if table.shape[1] == 0:
        raise DraftwellError("a comparison needs at least one measured prompt", code="no_prompts")
    if not np.isfinite(table).all() or (table <= 0).any():
        raise DraftwellError(
            "every measured prompt needs positive seconds and at least one token: measure again",
            code="not_positive",
        )
    return table


def _ratio(sums: np.ndarray) -> np.ndarray:
    """`[4, ...]` sums of seconds and tokens of both sides → speed of b over a."""
    return (sums[0] / sums[1]) / (sums[2] / sums[3])
