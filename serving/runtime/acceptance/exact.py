"""Exact acceptance: the output follows the target's distribution (Leviathan 2023, Algorithm 1; Chen
2023, Theorem 1).

Keep x_i iff r < p_i(x_i) / q_i(x_i); at the first rejection sample norm(max(0, p_i − q_i)) and end
the round; all kept: one bonus token from the next row. A deterministic proposal has a one-hot q:
keep with probability p(x).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from draftwell.serving.runtime.acceptance.in_order import KEPT, InOrder, TokenDecision
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.types import Draft


def keeps(draft: Draft, i: int, target: Span, rng: Streams) -> Step[bool]:
    """The exact test of draft token i; where the target has a choice the draft has to meet it."""
    token = draft.tokens[i]
    if target.sampling.has_choice:
        return token == (yield from target.draw(i, rng.sample)).token
    chance = yield from target.chance(i, token)
    return rng.test.accepts(chance, draft.prob(i))


def recover(draft: Draft, i: int, target: Span, rng: Streams) -> Step[int]:
    """Sample the token that replaces rejected draft token i from the residual distribution, or take
    the target's choice."""
    if target.sampling.has_choice:
        return (yield from target.draw(i, rng.sample)).token
    row = draft.row(i)
    without = [draft.tokens[i]] if row is None else []
    drawn = yield from target.draw(i, rng.sample, minus=row, without=without)
    return drawn.token


def draft_probs(draft: Draft, i: int, like: Tensor) -> Tensor:
    """Warped draft distribution `[vocab]` of token i; one-hot for a deterministic proposal."""
    row = draft.row(i)
    # draft and target may be on different devices
    return one_hot(draft.tokens[i], like) if row is None else row.probs(0).to(like.device)


def one_hot(token: int, like: Tensor) -> Tensor:
    """The distribution of a token that was proposed deterministically, shaped `like` another."""
    probs = like.new_zeros(like.shape)
    probs[token] = 1.0
    return probs


class Exact(InOrder):
    """The lossless rule."""

    lossless: ClassVar[bool] = True

    def look(self, draft: Draft, i: int, target: Span, rng: Streams) -> Step[TokenDecision]:
        if (yield from keeps(draft, i, target, rng)):
            return KEPT
        return TokenDecision((yield from recover(draft, i, target, rng)))
