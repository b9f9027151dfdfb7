"""Limits of stop policies that move with what was accepted. They learn between verifications only (METHODS, condition 3)."""

from __future__ import annotations

from serving.runtime.types import Draft, Verdict


class AdaptiveThreshold:
    """The threshold of Draft & Verify (2309.08168, section 3.3), in [0, 1].

    After a round with drafted > 0 tokens: AR ← .5·AR + .5·matched/drafted, AR = 0 at first;
    th' = th + .01 if AR < .9, th if the draft was as long as it may be, else th − .01; th ← .9·th + .1·th'.
    A round that drafted nothing has no ratio and changes nothing (ours).

    >>> threshold = AdaptiveThreshold(0.8, cap=8)
    >>> threshold.learn(Draft([5, 6]), Verdict(accepted=1, token=9, judged=2))
    >>> threshold.rate, round(threshold.value, 6)
    (0.25, 0.801)
    """

    WANTED, STEP, MEMORY, INERTIA = 0.9, 0.01, 0.5, 0.9

    def __init__(self, value: float, cap: int):
        self.value, self.cap = value, cap
        self.rate = 0.0

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Take in a round."""
        if not len(draft):
            return
        self.rate = self.MEMORY * self.rate + (1 - self.MEMORY) * verdict.accepted / len(draft)
        if self.rate < self.WANTED:
            moved = self.value + self.STEP
        elif len(draft) == self.cap:
            moved = self.value
        else:
            moved = self.value - self.STEP
        self.value = min(1.0, max(0.0, self.INERTIA * self.value + (1 - self.INERTIA) * moved))


class HeuristicLength:
    """transformers' schedule `heuristic`: two tokens more when all match, else one fewer, between 1 and `cap`.

    A round that drafted nothing changes nothing (ours); transformers knows no cap here.
    """

    def __init__(self, value: int, cap: int):
        self.value, self.cap = min(value, cap), cap

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Take in a round."""
        if len(draft):
            moved = self.value + 2 if verdict.accepted == len(draft) else self.value - 1
            self.value = min(self.cap, max(1, moved))
