"""FLy's deferred rejection: a rejected token stays where the target is undecided and then follows
the draft (FLy, 2511.22972, section 2.2).

Entropy gate: the entropy h of the target's raw distribution at the rejected position is at least
theta. Deferred window: the W draft tokens behind it exist and pass the exact test, each behind the
draft's own words; a second rejection among them means that the target corrects an error. A token
that stays is kept, and judging continues behind it.

Ours: no stop or special token stays, nor one that bans, top-k or top-p rule out; a request that
penalises or biases tokens is judged exactly.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from draftwell.serving.runtime.acceptance.exact import keeps, recover
from draftwell.serving.runtime.acceptance.in_order import KEPT, RESCUED, InOrder, TokenDecision
from draftwell.serving.runtime.acceptance.rescue import allowed
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.types import Draft, Verdict

EntropyName = Literal["normalised", "top3"]


class Deferred(InOrder):
    """Exact acceptance with FLy's two exceptions; one object serves one request.

    Args:
        entropy: how h is measured (`measured_entropy`).
        threshold: theta.
        window: W, draft tokens behind a rejected one that must pass the exact test.
        special_tokens: tokens that never stay.
    """

    lossless: ClassVar[bool] = False

    def __init__(
        self,
        entropy: EntropyName,
        threshold: float,
        window: int,
        special_tokens: frozenset[int] = frozenset(),
    ):
        self.entropy, self.threshold, self.window = entropy, threshold, window
        self.special_tokens = special_tokens
        self._passed: list[bool] = []  # of this draft, as far as it was tested

    def judge(
        self, draft: Draft, target: Span, rng: Streams, *, bonus: bool = True
    ) -> Step[Verdict]:
        self._passed = []
        return (yield from super().judge(draft, target, rng, bonus=bonus))

    def look(self, draft: Draft, i: int, target: Span, rng: Streams) -> Step[TokenDecision]:
        if (yield from self.passes(draft, i, target, rng)):
            return KEPT
        if (yield from self.undecided(draft, i, target)):
            for j in range(i + 1, i + 1 + self.window):
                if not (yield from self.passes(draft, j, target, rng)):
                    break
            else:
                return RESCUED
        return TokenDecision((yield from recover(draft, i, target, rng)))

    def passes(self, draft: Draft, i: int, target: Span, rng: Streams) -> Step[bool]:
        """The exact test of token i, made once: a window looks ahead at what is judged later."""
        while len(self._passed) <= i:
            self._passed.append((yield from keeps(draft, len(self._passed), target, rng)))
        return self._passed[i]

    def undecided(self, draft: Draft, i: int, target: Span) -> Step[bool]:
        """Whether a rejected token may stay, if its window fits into the draft and agrees."""
        token, sampling = draft.tokens[i], target.sampling
        if sampling.penalises or sampling.biases or i + self.window >= len(draft):
            return False
        if token in sampling.stop_token_ids | self.special_tokens:
            return False
        if measured_entropy(self.entropy, target, i) < self.threshold:
            return False
        return (yield from allowed(token, i, target))


def measured_entropy(name: EntropyName, target: Span, row: int) -> float:
    """h of the raw distribution p̄ at a row.

    `normalised`, the paper's: H(p̄) / ln |V|, in [0, 1]. `top3`, its code's: −Σ p̄·ln p̄ over the
    three likeliest tokens, in nats, at most ln 3.
    """
    if name == "normalised":
        return target.entropy(row) / math.log(target.values.shape[-1])
    return -sum(p * math.log(p) for _, p in target.likeliest(row, 3) if p > 0)
