"""Stop policies: how long a draft gets.

Each reads the draft's raw rows (docs/methods.md, "Two pairs of distributions"): at temperature 0 a
warped row is one-hot, and its entropy and confidence would say nothing. All but
`LowAcceptanceBound` look at a token that is drafted already, which stays.
"""

from __future__ import annotations

import math

from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.types import Draft, Verdict


def count_kept(table: AcceptanceTable, draft: Draft, verdict: Verdict) -> None:
    """Count by its confidence whether each draft token that was judged was kept."""
    for i, confidence in enumerate(draft.confidence[: verdict.judged]):
        table.update(confidence, kept=i < verdict.accepted)


class FixedLength:
    """Stop after `max_draft` tokens; the other policies are this one with a reason to stop
    earlier."""

    def __init__(self, max_draft: int):
        self.max_draft = max_draft
        self._drafted = 0

    def start(self) -> None:
        self._drafted = 0

    def stop_before(self, row: Span) -> bool:
        return False

    def stop_after(self, row: Span, token: int) -> bool:
        self._drafted += 1
        return self._drafted >= self.max_draft


class CumulativeAcceptance(FixedLength):
    """SPIDE: stop when the estimated probability that the whole draft is kept falls to tau
    (Algorithm 1, lines 4-12).

    Gamma = 1 at the start, Gamma ← Gamma·alpha(C) with every token; stop at Gamma <= tau, or at
    `max_draft` tokens (ours: with alpha = 1 the paper's loop may never stop).
    """

    def __init__(self, table: AcceptanceTable, tau: float, max_draft: int = 32):
        super().__init__(max_draft)
        self.table, self.tau = table, tau
        self._gamma = 1.0

    def start(self) -> None:
        super().start()
        self._gamma = 1.0

    def stop_after(self, row: Span, token: int) -> bool:
        self._gamma *= self.table.alpha(row.confidence(0))
        return super().stop_after(row, token) or self._gamma <= self.tau


class HighEntropy(FixedLength):
    """SVIP: stop after a token whose distribution q̄ has sqrt(scale·H(q̄)) > threshold
    (2411.18462).

    1 − sqrt(scale·H) estimates a lower bound of the chance that the token is accepted.
    """

    def __init__(self, threshold: float, max_draft: int, scale: float):
        super().__init__(max_draft)
        self.threshold, self.scale = threshold, scale

    def stop_after(self, row: Span, token: int) -> bool:
        return (
            super().stop_after(row, token)
            or math.sqrt(self.scale * row.entropy(0)) > self.threshold
        )


class UnlikelyToken(FixedLength):
    """Stop after a token x with q̄(x) < threshold (Draft & Verify, 2309.08168; dynamic speculation,
    2405.04304)."""

    def __init__(self, threshold: float, max_draft: int):
        super().__init__(max_draft)
        self.threshold = threshold

    def stop_after(self, row: Span, token: int) -> bool:
        return super().stop_after(row, token) or row.raw_prob(0, token) < self.threshold


class LowAcceptanceBound(FixedLength):
    """AdaEDL: stop before a token is drawn from a q̄ with 1 − sqrt(scale·H(q̄)) < threshold
    (Agrawal 2024).

    The token is never drawn, so nothing is dropped; a draft may be empty.
    """

    def __init__(self, threshold: float, max_draft: int, scale: float):
        super().__init__(max_draft)
        self.threshold, self.scale = threshold, scale

    def stop_before(self, row: Span) -> bool:
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

    def __init__(self, head: AcceptanceHead, threshold: float, shortest: int, max_draft: int):
        super().__init__(max_draft)
        self.head, self.threshold, self.shortest = head, threshold, shortest
        self._all_accepted = 1.0

    def start(self) -> None:
        super().start()
        self._all_accepted = 1.0

    def stop_after(self, row: Span, token: int) -> bool:
        if self._drafted > 0:
            self._all_accepted *= self.head.acceptance(row.hidden(0))
        at_cap = super().stop_after(row, token)
        return at_cap or (
            self._drafted >= self.shortest and 1.0 - self._all_accepted > self.threshold
        )


class Untrusted(FixedLength):
    """SPRINTER's verifier as a stop policy: stop after a token whose score falls below tau; the
    token stays, and the target judges the whole draft.

    Args:
        verifier: reads the state that produced a token (`before`) or `scalars`; `after` is known
            one forward pass too late.
        tau: in [0, 1]; None takes the verifier's own threshold.
        max_draft: longest draft.
    """

    def __init__(self, verifier: Verifier, tau: float | None = None, max_draft: int = 20):
        super().__init__(max_draft)
        if "after" in verifier.features:
            raise DraftwellError(
                "this verifier reads the state after a token, which a stop policy does not "
                "have: train one with "
                "the features before or scalars",
                code="unsupported_features",
            )
        self.verifier, self.tau = verifier, verifier.threshold if tau is None else tau

    def stop_after(self, row: Span, token: int) -> bool:
        return (
            super().stop_after(row, token)
            or self.verifier.score_drafted(row, None, token) < self.tau
        )
