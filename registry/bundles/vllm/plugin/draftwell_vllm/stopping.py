"""How long a draft gets: the stop rules of SPIDE, SVIP and dynamic speculation, each over
confidence and entropy of the next token.

A rule is asked about a token before it is drafted and may learn from what the target kept. Papers
stop after the token that triggers, because a draft model has been paid for it by then; `stays` says
so. N-grams cost nothing, so there the token is left out.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any

EDGES = (*(i / 10 for i in range(1, 10)), *(i / 100 for i in range(91, 100)), 1 - 2**-9)
"""Lower edges of the bins of an acceptance table but the first's, as Draftwell's artifact has
them."""
MIDPOINTS = (*((2 * i + 1) / 20 for i in range(9)), *(i / 1000 for i in range(905, 996, 10)), 0.999)
PRIOR_WEIGHT = 10
MOST_JUDGED = 2**15
"""Judged tokens of a bin that are remembered, as in Draftwell's table."""


class StopRule:
    """Asked about every token of a draft, in order; this one never stops by itself."""

    def start(self) -> None:
        """A new draft begins."""

    def continues(self, confidence: float, entropy: float) -> bool:
        """Whether the draft continues with a token of this confidence (0 to 1), from a distribution
        of this entropy (nats)."""
        return True

    def learn(self, confidence: float, kept: bool) -> None:
        """What the target did with a drafted token."""


class HFDynamicRule(StopRule):
    """Dynamic speculation (2405.04304): stop at a token of lower probability than `threshold`."""

    def __init__(self, threshold: float = 0.4):
        self.threshold = threshold

    def continues(self, confidence: float, entropy: float) -> bool:
        return confidence >= self.threshold


ENTROPY_SCALE = 0.15
"""Of the square root in SVIP's rule, which makes a confidence of an entropy."""


class SvipRule(StopRule):
    """SVIP (2411.18462): stop where sqrt(scale · entropy) is above `threshold`."""

    def __init__(self, threshold: float = 0.3):
        self.threshold = threshold

    def continues(self, confidence: float, entropy: float) -> bool:
        return math.sqrt(ENTROPY_SCALE * entropy) <= self.threshold


class SpideRule(StopRule):
    """SPIDE (Algorithm 1): stop where the estimated chance that the whole draft is kept falls to
    `tau`.

    The chance of a token comes from an acceptance table, which counts on while it serves.

    Args:
        tau: 0 to 1.
        total, accepted: [20] counts to begin with, as `table.json` of Draftwell's artifact has
            them; None begins with the bins' midpoints.
        prior_weight: judged tokens that a bin's midpoint counts for.
    """

    def __init__(
        self,
        tau: float = 0.1,
        *,
        total: list[int] | None = None,
        accepted: list[int] | None = None,
        prior_weight: float = PRIOR_WEIGHT,
    ):
        self.tau, self.prior_weight = tau, prior_weight
        self.total = list(total) if total is not None else [0] * len(MIDPOINTS)
        self.accepted = list(accepted) if accepted is not None else [0] * len(MIDPOINTS)
        self._chance = 1.0

    @classmethod
    def of_table(cls, rows: Mapping[str, Any], tau: float) -> SpideRule:
        """With the counts of an artifact's `table.json`.

        Raises:
            ValueError: it has not two counts for every bin, or a weight that is not above 0.
        """
        total, accepted, weight = (
            rows["total"],
            rows["accepted"],
            float(rows.get("prior_weight", PRIOR_WEIGHT)),
        )
        if not len(total) == len(accepted) == len(MIDPOINTS):
            raise ValueError(f"{len(total)} and {len(accepted)} counts instead of {len(MIDPOINTS)}")
        if (
            not all(isinstance(count, int) for count in [*total, *accepted])
            or not 0 < weight < math.inf
        ):
            raise ValueError("counts that are no whole numbers, or a weight that is not above 0")
        return cls(tau, total=total, accepted=accepted, prior_weight=weight)

    def start(self) -> None:
        self._chance = 1.0

    def alpha(self, confidence: float) -> float:
        """Estimated probability that a token drafted with this confidence is kept."""
        b = bisect.bisect_right(EDGES, confidence)
        return (self.accepted[b] + self.prior_weight * MIDPOINTS[b]) / (
            self.total[b] + self.prior_weight
        )

    def continues(self, confidence: float, entropy: float) -> bool:
        self._chance *= self.alpha(confidence)
        return self._chance > self.tau

    def learn(self, confidence: float, kept: bool) -> None:
        b = bisect.bisect_right(EDGES, confidence)
        self.total[b] += 1
        self.accepted[b] += int(kept)
        while self.total[b] > MOST_JUDGED:
            self.total[b], self.accepted[b] = self.total[b] // 2, self.accepted[b] // 2
