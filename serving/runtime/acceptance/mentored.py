"""Mentored decoding: accept as much as a budget of divergence from the target allows (Hugging Face,
2024).

The result follows π = max(a·p, min(q, b·p)) with a <= 1 <= b such that Σπ = 1 and KL(p‖π) = D; π =
q where KL(p‖q) <= D already. Of all distributions at that divergence from p it is the one that a
draft from q hits most often: keep with probability min(1, π/q), else sample norm(max(0, π − q)).

Because min(p, q) <= π wherever q > 0, the exact test may come first: a token that it keeps stays
under π too, and one that it rejects is kept with the rest of the probability. So π is computed at
rejections only, and D = 0 is exact acceptance.

p and q are the warped distributions, because π decides what is sampled: at temperature 0 the rule
is exact. Mass of q on tokens that p rules out (top-k, top-p) has no place in the formula; where it
keeps KL(p‖π) below D, b is at its largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwell.serving.runtime.acceptance.exact import draft_probs, keeps, recover
from draftwell.serving.runtime.acceptance.in_order import KEPT, RESCUED, InOrder, TokenDecision
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.sampling import residual
from draftwell.serving.runtime.types import Draft

HALVINGS = 60
"""Steps of the bisection of log a: from the widest interval, of 700, down to float64's
precision."""
LOG_LEAST = -700.0
"""log of the least a: exp of less is no float64."""


class Mentored(InOrder):
    """Exact acceptance relaxed up to a divergence.

    A token kept against the exact test counts as rescued.

    Args:
        budget: D in nats, at least 0.
    """

    lossless: ClassVar[bool] = False

    def __init__(self, budget: float):
        self.budget = budget

    def look(self, draft: Draft, i: int, target: Span, rng: Streams) -> Step[TokenDecision]:
        if (yield from keeps(draft, i, target, rng)):
            return KEPT
        if self.budget == 0.0 or target.sampling.greedy:
            return TokenDecision((yield from recover(draft, i, target, rng)))
        p, token = target.probs(i), draft.tokens[i]
        q = draft_probs(draft, i, p)
        mixture = mentored(p, q, self.budget).probs
        extra = float(mixture[token]) - float(p[token])
        if extra > 0.0 and rng.test.accepts(extra, float(q[token]) - float(p[token])):
            return RESCUED
        return TokenDecision(rng.sample.draw(residual(mixture, q)))


@dataclass(frozen=True)
class Mixture:
    """π `[vocab]` with its bounds; a = 0 and b = inf where π = q."""

    probs: Tensor
    a: float
    b: float


def mentored(target_probs: Tensor, draft_probs: Tensor, budget: float) -> Mixture:
    """π of two distributions `[vocab]` for KL(p‖π) = `budget` nats; float64 within, float32 out.

    >>> p, q = torch.tensor([0.8, 0.2]), torch.tensor([0.2, 0.8])
    >>> [round(x, 3) for x in mentored(p, q, 0.2).probs.tolist()]
    [0.494, 0.506]
    """
    p: NDArray[np.float64] = target_probs.double().cpu().numpy()
    q: NDArray[np.float64] = draft_probs.double().cpu().numpy()
    p, q = p / p.sum(), q / q.sum()
    if _kl(p, q) <= budget:
        return Mixture(draft_probs, 0.0, math.inf)
    curve = _Curve(p, q)
    low, high = curve.smallest_log_a(), 0.0
    if curve.divergence(low) > budget:
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if curve.divergence(middle) < budget else (middle, high)
    else:
        high = low
    a, b = math.exp(high), curve.b_of(high)
    mixture = np.maximum(a * p, np.minimum(q, b * p))
    return Mixture(torch.from_numpy(mixture / mixture.sum()).to(target_probs), a, b)


class _Curve:
    """KL(p‖π) as a function of log a, from sums over the tokens of p in ascending order of q/p.

    For each a there is one b with Σπ = 1: what max(a·p, ·) adds to q, min(q, b·p) must cut off.
    Both are piecewise linear in the ratios, so that b and the divergence are two binary searches
    and no pass over the vocabulary.
    """

    def __init__(self, p: NDArray[np.float64], q: NDArray[np.float64]):
        both = (p > 0) & (q > 0)
        self.outside = float(q[p == 0].sum())  # cut off whatever b is
        # tokens at ratio 0 act as one: a draft whose head is small leaves little to sort
        ruled_out = float(p[q == 0].sum())
        p, q = p[both], q[both]
        order = np.argsort(q / p)
        first = [0.0] if ruled_out > 0.0 else []
        q = np.concatenate([first, q[order]])
        p = np.concatenate([[ruled_out] if first else [], p[order]])
        self.ratio = q / p
        self.p_below, self.q_below = (np.concatenate([[0.0], np.cumsum(x)]) for x in (p, q))
        self.p_from, self.q_from = (
            np.concatenate([np.cumsum(x[::-1])[::-1], [0.0]]) for x in (p, q)
        )
        logs = np.log(self.ratio, out=np.zeros_like(q), where=self.ratio > 0)
        self.log_below = np.concatenate([[0.0], np.cumsum(p * logs)])
        # by a = ratio[i]; ascending, 0 at i = 0
        self.added = self.ratio * self.p_below[:-1] - self.q_below[:-1]
        # by b = ratio[i]; descending, 0 at the last
        self.cut = self.q_from[:-1] - self.ratio * self.p_from[:-1]

    def smallest_log_a(self) -> float:
        """log of the a that adds just what q has outside p's support, at which b is at its
        largest."""
        if self.outside == 0.0:
            smallest = float(self.ratio[0])
        else:
            i = int(np.searchsorted(self.added, self.outside, side="right"))
            smallest = float((self.outside + self.q_below[i]) / self.p_below[i])
        return min(0.0, math.log(smallest)) if smallest > 0.0 else LOG_LEAST

    def b_of(self, log_a: float) -> float:
        """The b that makes Σπ = 1."""
        a = math.exp(log_a)
        i = int(np.searchsorted(self.ratio, a))
        surplus = max(0.0, a * float(self.p_below[i]) - float(self.q_below[i]) - self.outside)
        # tokens from place j on are cut
        j = len(self.cut) - int(np.searchsorted(self.cut[::-1], surplus, side="right"))
        return max(
            1.0,
            float((self.q_from[j] - surplus) / self.p_from[j])
            if j < len(self.cut)
            else float(self.ratio[-1]),
        )

    def divergence(self, log_a: float) -> float:
        """KL(p‖π) in nats."""
        b = self.b_of(log_a)
        i = int(np.searchsorted(self.ratio, math.exp(log_a)))
        j = max(i, int(np.searchsorted(self.ratio, b, side="right")))
        raised, cut = float(self.p_below[i]), float(self.p_from[j])
        return -log_a * raised + float(self.log_below[i] - self.log_below[j]) - math.log(b) * cut


def _kl(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    support = p > 0
    p, q = p[support], q[support]
    return math.inf if bool((q == 0).any()) else float((p * (np.log(p) - np.log(q))).sum())
