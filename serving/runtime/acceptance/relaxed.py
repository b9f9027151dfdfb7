"""Relaxed acceptance: rules that trade the target's exact distribution for longer runs.

`Fuzzy` (fuzzy speculative decoding, 2502.20704; PyramidSD, section 3.2): keep iff Div(p̄, q̄) <=
tau, else sample the judge's own warped distribution p. Not a residual: the decision does not depend
on which token q drew, so p is what is left. Ours: a request that penalises or biases tokens is
judged exactly, because p̄ and q̄ do not know of it.

PyramidSD's section 3.4 has two readings. `SampleAndMatch` (assisted decoding): the judge draws t
from p; keep iff x = t, else t. `RatioOrOwn`: keep with probability min(1, p/q) as speculative
decoding does, but at a rejection draw from p instead of the residual.
"""

from __future__ import annotations

from typing import ClassVar

from draftwell.serving.runtime.acceptance.divergence import DivergenceName
from draftwell.serving.runtime.acceptance.exact import Exact, keeps
from draftwell.serving.runtime.acceptance.in_order import KEPT, RESCUED, InOrder, TokenDecision
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Divergence, Span
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.types import Draft


class Fuzzy(Exact):
    """Keep while the two models agree about the position.

    A kept token that the exact rule could have rejected (p(x) < q(x); at temperature 0: not the
    judge's argmax) counts as rescued.

    Args:
        name: the divergence; thresholds of different ones do not compare.
        tau: in [0, inf), largest divergence that is kept.
    """

    lossless: ClassVar[bool] = False

    def __init__(self, name: DivergenceName, tau: float):
        self.name, self.tau = name, tau

    def look(self, draft: Draft, i: int, target: Span, rng: Streams) -> Step[TokenDecision]:
        if target.sampling.penalises or target.sampling.biases:
            return (yield from super().look(draft, i, target, rng))
        apart = yield Divergence(self.name, target[i], draft.row(i), draft.tokens[i])
        if apart > self.tau:
            return TokenDecision((yield from target.draw(i, rng.sample)).token)
        return RESCUED if (yield from could_be_rejected(draft, i, target)) else KEPT


class SampleAndMatch(InOrder):
    """Keep a token iff the judge draws the same: the output is the judge's own, whatever was
    proposed."""

    lossless: ClassVar[bool] = True
    reads_chances: ClassVar[bool] = False

    def look(self, draft: Draft, i: int, target: Span, rng: Streams) -> Step[TokenDecision]:
        own = (yield from target.draw(i, rng.sample)).token
        return KEPT if own == draft.tokens[i] else TokenDecision(own)


class RatioOrOwn(Exact):
    """Keep a token with probability min(1, p/q), else the judge draws from its own p.

    More is kept than by `SampleAndMatch`, Σ min(p, q) for Σ p·q, but the output is not the
    judge's own: a token follows min(p, q) + (1 − β)·p with β = Σ min(p, q), whose total variation
    from p is at most β(1 − β) ≤ ¼.
    """

    lossless: ClassVar[bool] = False

    def look(self, draft: Draft, i: int, target: Span, rng: Streams) -> Step[TokenDecision]:
        if (yield from keeps(draft, i, target, rng)):
            return KEPT
        return TokenDecision((yield from target.draw(i, rng.sample)).token)


def could_be_rejected(draft: Draft, i: int, target: Span) -> Step[bool]:
    """Whether exact acceptance keeps draft token i with a probability below 1."""
    token = draft.tokens[i]
    if target.sampling.greedy:
        return token != target.top[i]
    p = yield from target.chance(i, token)
    return p == 0.0 or p < draft.prob(i)
