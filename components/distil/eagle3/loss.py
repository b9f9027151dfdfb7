"""KL divergence from the target's distribution over the head's tokens, without keeping any logits.

A position has thousands of logits, and autograd would keep several copies of them for every step of
the unrolled head. The derivative of the loss by the logits is known (head's distribution minus the
target's), so forward computes the derivative by the states at once, piece by piece, and backward
only scales it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 128
"""Positions whose logits exist at the same time."""


@dataclass(frozen=True)
class Wanted:
    """The target's distributions at some positions.

    Args:
        probabilities: `[positions, head]` float32, over the head's tokens.
        negentropy: `[positions]`, Σ p log p.
        best: `[positions]`, index of the likeliest.
    """

    probabilities: Tensor
    negentropy: Tensor
    best: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, states: Tensor, rows: Tensor) -> Wanted:
        """From the target's normalised last states `[positions, hidden]` and its rows of the head's
        tokens `[head, hidden]`.

        Pieces are small enough for the processor's cache; logits are rounded as `rows` is.
        """
        probabilities = torch.empty(len(states), len(rows), device=states.device)
        negentropy = torch.empty(len(states), device=states.device)
        for at in range(0, len(states), PIECE):
            piece = slice(at, at + PIECE)
            logs = F.linear(states[piece].to(rows.dtype), rows).float().log_softmax(-1)
            probabilities[piece] = torch.exp(logs)
            negentropy[piece] = (probabilities[piece] * logs).sum(-1)
        return cls(probabilities, negentropy, probabilities.argmax(-1))


class _Divergence(torch.autograd.Function):
    """Sum over positions of KL + hard_weight × cross-entropy, and its parts."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, wanted: Wanted, places: Tensor, hard_weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        derivative = torch.empty(states.shape, device=states.device)
        soft, hard, right = (torch.empty(len(states), device=states.device) for _ in range(3))
        for at in range(0, len(states), PIECE):
            piece = slice(at, at + PIECE)
            chosen = places[piece]
            logits = F.linear(states[piece].to(rows.dtype), rows).float()
            mine, theirs = logits.softmax(-1), wanted.probabilities[chosen]
            top, labels = logits.amax(-1), wanted.best[chosen][:, None]
            total = top - mine.amax(-1).log()  # logsumexp of the logits
            soft[piece] = wanted.negentropy[chosen] + total - (theirs * logits).sum(-1)
            said = logits.gather(1, labels)[:, 0]
            hard[piece], right[piece] = total - said, (said >= top).float()
            by_logits = mine.mul_(1 + hard_weight).sub_(theirs)
            by_logits.scatter_add_(
                1, labels, torch.full_like(labels, -hard_weight, dtype=torch.float32)
            )
            derivative[piece] = (by_logits.to(rows.dtype) @ rows).float()
        ctx.save_for_backward(derivative)
        loss = soft.sum() + hard_weight * hard.sum()
        ctx.mark_non_differentiable(soft, right)
        return loss, soft, right

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (derivative,) = ctx.saved_tensors
        return derivative * by_loss, None, None, None, None


def divergence(
    states: Tensor, rows: Tensor, wanted: Wanted, places: Tensor, hard_weight: float
) -> tuple[Tensor, float, float]:
    """Mean loss of some positions.

    Args:
        states: `[n, hidden]` normalised states of the head.
        rows: `[head, hidden]` frozen rows of the output embedding.
        places: `[n]` which of the wanted distributions each position is compared with.
        hard_weight: weight of the cross-entropy with the target's likeliest token.
    Returns:
        mean of KL(target ‖ head) + hard_weight × cross-entropy, mean KL, and share of positions
        where the likeliest token is the target's.
    """
    loss, soft, right = _Divergence.apply(states, rows, wanted, places, hard_weight)
    return loss / len(states), float(soft.mean()), float(right.mean())
