"""Stop policies: how long a draft gets.

Each reads the draft's raw rows (docs/methods.md, "Two pairs of distributions"): at temperature 0 a
warped row is one-hot, and its entropy and confidence would say nothing. All but
`LowAcceptanceBound` look at a token that is drafted already, which stays.
"""

from __future__ import annotations

import math

from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.runtime.types import Rows


class FixedLength:
    """Stop after `num_tokens` tokens; the other policies are this one with a reason to stop
    earlier."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self._drafted = 0

    def start(self) -> None:
        self._drafted = 0

    def stop_before(self, row: Rows) -> bool:
        return False

    def stop_after(self, row: Rows, token: int) -> bool:
        self._drafted += 1
        return self._drafted >= self.num_tokens


class CumulativeAcceptance(FixedLength):
    """SPIDE: stop when the estimated probability that the whole draft is kept falls to tau
    (Algorithm 1, lines 4-12).

    Gamma = 1 at the start, Gamma ← Gamma·alpha(C) with every token; stop at Gamma <= tau, or at
    `cap` tokens (ours: with alpha = 1 the paper's loop may never stop).
    """

    def __init__(self, table: AcceptanceTable, tau: float, cap: int = 32):
        super().__init__(cap)
        self.table, self.tau = table, tau
        self._gamma = 1.0

    def start(self) -> None:
        super().start()
        self._gamma = 1.0

    def stop_after(self, row: Rows, token: int) -> bool:
        self._gamma *= self.table.alpha(row.confidence(0))
        return super().stop_after(row, token) or self._gamma <= self.tau


class HighEntropy(FixedLength):
    """SVIP: stop after a token whose distribution q̄ has sqrt(scale·H(q̄)) > threshold
    (2411.18462).

    1 − sqrt(scale·H) estimates a lower bound of the chance that the token is accepted.
    """

    def __init__(self, threshold: float, cap: int, scale: float):
        super().__init__(cap)
        self.threshold, self.scale = threshold, scale

    def stop_after(self, row: Rows, token: int) -> bool:
        return (
            super().stop_after(row, token)
            or math.sqrt(self.scale * row.entropy(0)) > self.threshold
        )


class UnlikelyToken(FixedLength):
    """Stop after a token x with q̄(x) < threshold (Draft & Verify, 2309.08168; dynamic speculation,
    2405.04304)."""

    def __init__(self, threshold: float, cap: int):
        super().__init__(cap)
        self.threshold = threshold

    def stop_after(self, row: Rows, token: int) -> bool:
        return super().stop_after(row, token) or row.raw_prob(0, token) < self.threshold


class LowAcceptanceBound(FixedLength):
    """AdaEDL: stop before a token is drawn from a q̄ with 1 − sqrt(scale·H(q̄)) < threshold
    (Agrawal 2024).

    The token is never drawn, so nothing is dropped; a draft may be empty.
    """

    def __init__(self, threshold: float, cap: int, scale: float):
        super().__init__(cap)
        self.threshold, self.scale = threshold, scale

    def stop_before(self, row: Rows) -> bool:
        return 1.0 - math.sqrt(self.scale * row.entropy(0)) < self.threshold


class PredictedRejection(FixedLength):
    """SpecDec++: stop when 1 − Π acc_i > threshold, acc_i the predicted acceptance of draft token i
    (2405.19715).

    The state that has read token i is also the one that gives the distribution of token i + 1, so
    the first prediction comes with the second token and costs no forward pass; token i, which
    triggers, and token i + 1 both stay (as in the authors' code).

    Args:
        shortest: draft at least this many tokens, unless a stop token or the budget ends the draft.
    """

    def __init__(self, head: AcceptanceHead, threshold: float, shortest: int, cap: int):
        super().__init__(cap)
        self.head, self.threshold, self.shortest = head, threshold, shortest
        self._all_accepted = 1.0

    def start(self) -> None:
        super().start()
        self._all_accepted = 1.0

    def stop_after(self, row: Rows, token: int) -> bool:
        if self._drafted > 0:
            self._all_accepted *= self.head.acceptance(row.hidden(0))
        at_cap = super().stop_after(row, token)
        return at_cap or (
            self._drafted >= self.shortest and 1.0 - self._all_accepted > self.threshold
        )
