"""Exact acceptance: the output follows the target's distribution (Leviathan 2023, Algorithm 1; Chen 2023, Theorem 1).

Keep x_i iff r < p_i(x_i) / q_i(x_i); at the first rejection sample norm(max(0, p_i − q_i)) and end the round; all kept:
one bonus token from the next row. A deterministic proposal has a one-hot q: keep with probability p(x).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from serving.runtime.acceptance.in_order import KEPT, InOrder, TokenDecision
from serving.runtime.random_streams import Streams
from serving.runtime.sampling import residual
from serving.runtime.types import Draft, Rows


def keeps(draft: Draft, i: int, target: Rows, rng: Streams) -> bool:
    """The exact test of draft token i; a greedy request consumes no randomness."""
    token = draft.tokens[i]
    if target.sampling.greedy:
        return token == target.top[i]
    q = float(draft.rows[i].probs(0)[token]) if draft.rows else 1.0
    return rng.test.accepts(float(target.probs(i)[token]), q)


def recover(draft: Draft, i: int, target: Rows, rng: Streams) -> int:
    """Sample the token that replaces rejected draft token i from the residual distribution."""
    if target.sampling.greedy:
        return target.top[i]
    return rng.sample.draw(residual(target.probs(i), draft_probs(draft, i, target.probs(i))))


def draft_probs(draft: Draft, i: int, like: Tensor) -> Tensor:
    """Warped draft distribution `[vocab]` of token i; one-hot for a deterministic proposal."""
    if draft.rows:
        return draft.rows[i].probs(0).to(like.device)  # draft and target may compute on different devices
    one_hot = like.new_zeros(like.shape)
    one_hot[draft.tokens[i]] = 1.0
    return one_hot


class Exact(InOrder):
    """The lossless rule."""

    lossless: ClassVar[bool] = True

    def look(self, draft: Draft, i: int, target: Rows, rng: Streams) -> TokenDecision:
        return KEPT if keeps(draft, i, target, rng) else TokenDecision(recover(draft, i, target, rng))
