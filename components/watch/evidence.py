"""Is a figure worse than its baseline? An answer that may be asked for every minute.

Each window gives an effect (log ratio to the baseline; positive is worse). The null hypothesis is
that windows are not worse than a tolerance on average; `z` is the excess over the tolerance in
long-run standard deviations. For every λ of a grid, e^(λz − λ²/2) is an e-value of a window
(sub-Gaussian), their product since a moment is an e-process, and the largest over all moments is
Page's CUSUM as an e-detector (Shin, Ramdas and Rinaldo, arXiv:2203.03532): by Ville's inequality it
reaches 1/α at most α times a window, however often one looks, so the threshold follows from the
days that are to lie between two false alarms. The mean over λ replaces a guess of the effect.

Windows are alike in time and more spread than counts would be: the variance is the long-run one
between the baseline's windows (`long_run_variance`), so that it is that of sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwell.components.engines.port import Message

RATES = (0.25, 0.5, 1.0, 2.0)
"""λ: each is best for an excess of so many standard deviations."""
LARGEST_Z = 4.0
"""A window counts for no more: one alone, however odd, raises no alarm."""
SMALLEST_SPREAD = 0.01
FEWEST = 30
BATCH = 12
"""Windows of a batch mean."""
LATEST = 10
"""Windows whose mean says how large an effect is now."""


class Normal(Message):
    """A figure in quiet windows."""

    mean: float
    spread: float
    """Long-run standard deviation of a window."""
    low: float
    """Below which a fortieth of the windows were: a lone burst widens no range."""
    high: float
    """Above which a fortieth were."""
    windows: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Normal:
        """Of at least two values, in the order of time."""

        x = np.asarray(values, dtype=float)
        low, high = (float(end) for end in np.quantile(x, [0.025, 0.975]))
        spread = max(math.sqrt(long_run_variance(x)), SMALLEST_SPREAD)
        return cls(
            mean=float(x.mean()),
            spread=spread,
            low=low,
            high=high,
            windows=len(x),
        )

    def covers(self, value: float | None, margin: float) -> bool:
        """Whether a value is one that quiet windows have, or nearly."""
        return value is None or self.low - margin <= value <= self.high + margin


def long_run_variance(x: np.ndarray) -> float:
    """n · variance of the mean of n successive windows, as large as it may well be: the larger of
    two estimates, each at the upper end of its 80 % interval.

    That of an AR(1) process is exact for what it knows, but noise of single windows hides a slow
    wander from it; batch means show the wander, and are few.
    """
    from scipy.special import chdtri  # scipy.stats takes a second to import

    n, centred = len(x), x - x.mean()
    square = float(centred @ centred)
    rho = float(centred[1:] @ centred[:-1]) / max(square, 1e-30)
    rho = min(max(rho + (1 + 3 * rho) / n, 0.0), 0.9)  # its bias in short series
    freedom = max(n * (1 - rho) / (1 + rho), 5) - 1
    of_ar1 = square / (n - 1) * (1 + rho) / (1 - rho) * freedom / float(chdtri(freedom, 0.9))
    batches = n // BATCH
    if batches < 4:
        return of_ar1
    means = x[: batches * BATCH].reshape(batches, BATCH).mean(1)
    freedom = batches - 1
    return max(of_ar1, BATCH * float(means.var()) * batches / float(chdtri(freedom, 0.9)))


@dataclass(frozen=True)
class Episode:
    """A time in which a figure was worse: indices of windows.

    Args:
        since: the first window that is worse.
        seen: where the evidence sufficed.
        until: where it was as in the baseline again; None: it still is worse.
        p: of the evidence at its strongest, corrected for all beginnings.
    """

    since: int
    seen: int
    until: int | None
    p: float


def episodes(
    effects: Sequence[float],
    normal: Normal,
    limit: float,
    threshold: float,
    *,
    from_first: bool = False,
) -> list[Episode]:
    """Times in which a figure was worse than its baseline by its limit, beyond doubt.

    Args:
        effects: of each window, in the order of time; positive is worse.
        normal: of the same effects in the baseline, whose mean is taken off.
        limit: effect that matters; half of it is tolerated.
        threshold: natural logarithm of 1/α.
        from_first: a change can only have come with the first window. Evidence is then not begun
            again where it says nothing, and α is the chance of a false alarm in all windows.
    """
    tolerance = max(limit / 2, 2 * normal.spread / math.sqrt(normal.windows))
    x = np.asarray(effects, dtype=float) - normal.mean
    steps = np.minimum((x - tolerance) / normal.spread, LARGEST_Z)
    cap = threshold + math.log(len(RATES)) + 1
    sums, since = [0.0] * len(RATES), [0] * len(RATES)
    found: list[Episode] = []
    open_since, open_seen, best = -1, -1, 0.0
    for i, z in enumerate(steps.tolist()):
        if open_seen >= 0:
            best = max(best, log_mean_exp(sums))
            latest = x[max(open_seen, i - LATEST + 1) : i + 1]
            if len(latest) == LATEST and latest.mean() < limit / 2:
                found.append(Episode(open_since, open_seen, i, chance(best, i)))
                sums, open_seen = [0.0] * len(RATES), -1
            continue
        for j, rate in enumerate(RATES):
            if sums[j] <= 0 and not from_first:
                sums[j], since[j] = 0.0, i
            sums[j] = min(sums[j] + rate * z - rate * rate / 2, cap)
        best = log_mean_exp(sums)
        if best >= threshold:
            start = since[int(np.argmax(sums))]
            if x[max(start, i - LATEST + 1) : i + 1].mean() >= limit:
                open_since, open_seen = start, i
    if open_seen >= 0:
        found.append(Episode(open_since, open_seen, None, chance(best, len(steps))))
    return found


def log_mean_exp(values: Sequence[float]) -> float:
    """Logarithm of the mean of e to these."""
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values) / len(values))


def chance(log_evidence: float, windows: int) -> float:
    """p value that holds at every look: evidence, times the beginnings that were tried."""
    return min(1.0, (windows + 1) * math.exp(-log_evidence))
