"""How far a draft's distribution is from the target's, a few rows at a time.

The logits of a batch over thousands of tokens are the largest numbers of a training step. Here they
are made for some rows, turned into the gradient of the states that they come from, and forgotten:
what a processor's caches hold is read many times (the idea of fused linear cross-entropy, as in
Liger Kernel, arXiv 2410.10989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.components.distil.family import Head

ROWS = {"cpu": 128, "cuda": 2048}
"""Rows whose logits exist at once, by the kind of device: as many as caches hold, or keep it
busy."""


@dataclass(frozen=True)
class Divergence:
    """A loss between the target's distribution p over the head's tokens and the draft's q.

    Args:
        head: the target's.
        kind: KL(p ‖ q), or total variation ½ Σ |p − q|, which is one minus the chance of
            acceptance.
        hard_weight: weight of the cross-entropy with the target's likeliest token, which is the
            text itself where the target wrote it; under KL only.
    """

    head: Head
    kind: Literal["kl", "tv"] = "kl"
    hard_weight: float = 0.0

    def __call__(
        self, states: Tensor, wanted: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of some rows.

        Args:
            states: `[n, hidden]` of the draft, normalised.
            wanted: `[n, hidden]`, the target's.
            weight: `[n]` of each row.
        Returns:
            the weighted sum, which gradients of `states` come from; `[n]` the divergence of each
            row without the cross-entropy; and `[n]` bool, whether the likeliest tokens are the
            same.
        """
        found: tuple[Tensor, Tensor, Tensor] = _Chunked.apply(states, wanted, weight, self)
        return found

    def of(self, guess: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of log-probabilities `[n, head]`, which are written over: `[n]` loss, divergence and
        whether the likeliest tokens are the same, and `[n, head]` the loss's gradient by the
        draft's logits."""
        top = target.argmax(-1, keepdim=True)
        chosen = guess.gather(1, top)
        same = (guess.argmax(-1, keepdim=True) == top)[:, 0]
        p = target.exp()
        if self.kind == "tv":
            q = guess.exp_()
            half = (q - p).sign_().mul_(0.5)
            distance = (q - p).abs_().sum(-1) / 2
            gradient = q.mul_(half - (q * half).sum(-1, keepdim=True))
            return distance, distance, same, gradient
        distance = target.sub_(guess).mul_(p).sum(-1)
        gradient = guess.exp_().mul_(1 + self.hard_weight).sub_(p)
        gradient.scatter_add_(1, top, torch.full_like(chosen, -self.hard_weight))
        return distance - self.hard_weight * chosen[:, 0], distance, same, gradient


class _Chunked(torch.autograd.Function):
    """`Divergence` with its gradient made on the way forward."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, wanted: Tensor, weight: Tensor, loss: Divergence
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, rows = len(states), ROWS[states.device.type]
        # all parts have the same shape, as batches have (corpus.WIDTHS)
        missing = -count % rows
        states, wanted = (F.pad(one, (0, 0, 0, missing)) for one in (states, wanted))
        parts = [one.split(rows) for one in (states, wanted, F.pad(weight, (0, missing)))]
        total = torch.zeros((), device=states.device)
        found, gradients = [], []
        for mine, theirs, share in zip(*parts, strict=True):
            with torch.enable_grad():
                mine = mine.detach().requires_grad_()
                logits = loss.head(mine)
            target = loss.head(theirs).log_softmax(-1)
            each, *others, gradient = loss.of(logits.detach().log_softmax(-1), target)
            total += (each * share).sum()
            found.append(others)
            if ctx.needs_input_grad[0]:
                gradient.mul_(share[:, None])
                gradients += torch.autograd.grad(logits, mine, gradient)
        if gradients:
            ctx.save_for_backward(torch.cat(gradients)[:count])
        distance, same = (torch.cat(one)[:count] for one in zip(*found, strict=True))
        ctx.mark_non_differentiable(distance, same)
        return total, distance, same

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None
