"""Distributions of many positions of one model at once, over the tokens that the model's head
covers.

A distilled draft's head covers a part of the vocabulary; everything else has logit −∞. Metrics of
raw and warped distributions (docs/methods.md) need the head's own columns only. That saves most of
the time that a trace takes to compute.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from draftwell.serving.errors import NotFinite
from draftwell.serving.runtime.logits import Span, spread
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import inverted, sum_rows, warp


class Distributions:
    """Raw and warped distributions of n positions.

    Args:
        logits: `[n, columns]` float32.
        support: `[columns]` ascending token ids of the columns; None where column i is token i.
        vocab_size: needed with `support`.
    Raises:
        NotFinite: a logit is NaN or +∞, or all of a position are −∞.
    """

    def __init__(self, logits: Tensor, support: Tensor | None = None, vocab_size: int = 0):
        self.logits, self.support, self.vocab_size = logits, support, vocab_size
        # NaN wins every comparison, so one pass finds it
        self.largest, self._first = logits.max(-1)
        if not bool(self.largest.isfinite().all()):
            raise NotFinite("a model returned NaN or infinite logits: check its weights and dtype")

    @classmethod
    def of(cls, span: Span) -> Distributions:
        """Of some positions of a forward pass."""
        return cls(span.values, span.whole.support, span.whole.vocab_size)

    def tokens(self, columns: Tensor) -> Tensor:
        """Token ids of columns; any shape."""
        return columns if self.support is None else self.support[columns]

    @property
    def top(self) -> Tensor:
        """The likeliest token of each position `[n]`; the first one of a tie."""
        return self.tokens(self._first)

    @cached_property
    def raw(self) -> Tensor:
        """Raw probabilities `[n, columns]`."""
        return self.logits.softmax(-1)

    @cached_property
    def confidence(self) -> Tensor:
        """C: the largest raw probability of each position `[n]`."""
        return self.raw.amax(-1)

    @cached_property
    def entropy(self) -> Tensor:
        """H of each raw distribution `[n]`, in nats."""
        return sum_rows(torch.special.entr(self.raw))

    def raw_prob(self, tokens: Tensor) -> Tensor:
        """Raw probability `[n]` of one token of each position."""
        return self._at(self.raw, tokens, 0.0)

    def rank(self, tokens: Tensor) -> Tensor:
        """How many tokens are likelier than the given one of each position `[n]`."""
        return (self.logits > self._at(self.logits, tokens, float("-inf"))[:, None]).sum(-1)

    def gap(self) -> Tensor:
        """The largest logit of each position minus its second largest `[n]`."""
        return self.largest - self.logits.scatter(1, self._first[:, None], float("-inf")).amax(-1)

    def candidates(self, count: int) -> tuple[Tensor, Tensor]:
        """The likeliest `count` tokens of each position and their raw probabilities, both `[n,
        count]`."""
        best = self.raw.topk(min(count, self.raw.shape[1]))
        return self.tokens(best.indices), best.values

    def warped(self, sampling: Sampling) -> Tensor:
        """Warped probabilities `[n, vocab]`."""
        return spread(warp(self.logits, sampling), self.support, self.vocab_size)

    def drawn(self, sampling: Sampling, uniforms: Tensor) -> Tensor:
        """A token of each position `[n]` from its warped distribution, by `uniforms` `[n]` in [0,
        1)."""
        return self.tokens(inverted(warp(self.logits, sampling), uniforms))

    def _at(self, values: Tensor, tokens: Tensor, missing: float) -> Tensor:
        """The value `[n]` of one token of each position, from `[n, columns]`."""
        tokens = tokens.to(values.device)
        if self.support is None:
            return values.gather(1, tokens[:, None]).squeeze(1)
        column = torch.searchsorted(self.support, tokens).clamp(max=len(self.support) - 1)
        return (
            values.gather(1, column[:, None])
            .squeeze(1)
            .masked_fill(self.support[column] != tokens, missing)
        )


def residuals(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(0, p − q) of each row `[n, vocab]`, not normalised; p itself where rounding leaves no
    mass."""
    left = (target_probs - draft_probs).clamp(min=0.0)
    return torch.where(sum_rows(left)[:, None] > 0.0, left, target_probs)
