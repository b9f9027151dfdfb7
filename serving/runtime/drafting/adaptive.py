"""Limits of stop policies that move with what was accepted. They learn between verifications only
(docs/methods.md, condition 3).

All that one has learnt is what `learnt` returns, a value of one moment whichever thread asks;
`resume` continues from there.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftwell.serving.runtime.types import Draft, Verdict


class AdaptiveThreshold:
    """The threshold of Draft & Verify (2309.08168, section 3.3), in [0, 1].

    After a round with drafted > 0 tokens: AR ← .5·AR + .5·matched/drafted, AR = 0 at first; th' =
    th + .01 if AR < .9, th if the draft was as long as it may be, else th − .01; th ← .9·th +
    .1·th'. A round that drafted nothing has no ratio and changes nothing (ours); nor does one whose
    draft a busy server cut (`Draft.cut`).

    >>> threshold = AdaptiveThreshold(0.8, max_draft=8)
    >>> threshold.learn(Draft([5, 6]), Verdict(accepted=1, token=9, judged=2))
    >>> threshold.rate, round(threshold.value, 6)
    (0.25, 0.801)
    """

    WANTED, STEP, MEMORY, INERTIA = 0.9, 0.01, 0.5, 0.9

    def __init__(self, value: float, max_draft: int):
        self.max_draft = max_draft
        # replaced as a whole: a reader on another thread never sees one of before and one of after
        self._learnt = value, 0.0

    @property
    def value(self) -> float:
        """th."""
        return self._learnt[0]

    @property
    def rate(self) -> float:
        """AR."""
        return self._learnt[1]

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Take in a round."""
        if not len(draft) or draft.cut:
            return
        value, rate = self._learnt
        rate = self.MEMORY * rate + (1 - self.MEMORY) * verdict.accepted / len(draft)
        if rate < self.WANTED:
            moved = value + self.STEP
        elif len(draft) == self.max_draft:
            moved = value
        else:
            moved = value - self.STEP
        self._learnt = min(1.0, max(0.0, self.INERTIA * value + (1 - self.INERTIA) * moved)), rate

    def learnt(self) -> dict[str, float]:
        """Threshold and rate."""
        value, rate = self._learnt
        return {"value": value, "rate": rate}

    def resume(self, learnt: Mapping[str, float]) -> None:
        """Go on from what `learnt` gave; raises ValueError for anything else."""
        self._learnt = bounded(learnt, "value", 0, 1), bounded(learnt, "rate", 0, 1)


class HeuristicLength:
    """transformers' schedule `heuristic`: two tokens more when all match, else one fewer, between 1
    and `max_draft`.

    A round that drafted nothing, or whose draft a busy server cut, changes nothing (ours);
    transformers has no longest draft here.
    """

    def __init__(self, value: int, max_draft: int):
        self.value, self.max_draft = min(value, max_draft), max_draft

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Take in a round."""
        if len(draft) and not draft.cut:
            moved = self.value + 2 if verdict.accepted == len(draft) else self.value - 1
            self.value = min(self.max_draft, max(1, moved))

    def learnt(self) -> dict[str, float]:
        """The length."""
        return {"value": self.value}

    def resume(self, learnt: Mapping[str, float]) -> None:
        """Go on from what `learnt` gave; raises ValueError for anything else."""
        self.value = int(bounded(learnt, "value", 1, self.max_draft))


def bounded(learnt: Mapping[str, float], name: str, least: float, most: float) -> float:
    """A number of a snapshot within its bounds."""
    value = learnt.get(name)
    if not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least} to {most}, not {value!r}")
    return value
