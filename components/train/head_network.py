"""The acceptance head's network and loss (SpecDec++, 2405.19715, section 4.2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from draftwell.components.train.examples import Examples
from draftwell.components.train.fit import Budget, fit, shuffled_rows
from draftwell.components.train.head_examples import labels_of
from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.base import Provenance

BLOCKS = 1
"""D, residual blocks, as in the authors' script; their best results are of 3, which are slower on a
CPU."""
MISMATCH_WEIGHT = 6.0
"""Weight of 1 − label in the loss."""
EPOCHS = 3
BATCH, WARMUP = 16, 0.03


class Network(nn.Module):
    """The head during training: D blocks x + SiLU(W x + b) and a linear layer, on standardised
    states.

    Args:
        first_logit: the prediction before training.
    """

    def __init__(self, width: int, first_logit: float):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(BLOCKS))
        self.last = nn.Linear(width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, first_logit)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + silu(block(x))
        logits: Tensor = self.last(x).squeeze(-1)
        return logits


def train_network(train: Examples, provenance: Provenance, seed: int = 0) -> AcceptanceHead:
    """Train for `EPOCHS` epochs; the same seed and examples give the same head."""
    x = torch.from_numpy(train.features(("after",)))
    y = torch.from_numpy(labels_of(train))
    mean, scale = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    x = (x - mean) / scale
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Network(x.shape[1], best_constant(train))

    def loss(rows: Tensor, _: int) -> tuple[Tensor, dict[str, float]]:
        found = weighted_loss(network(x[rows]), y[rows])
        return found, {"loss": float(found.detach())}

    budget = passes_budget(EPOCHS, math.ceil(len(x) / BATCH))
    fit(network, loss, budget, shuffled_rows(len(x), BATCH, seed))
    layers: list[Any] = list(network.blocks)
    return AcceptanceHead(
        mean,
        scale,
        [(block.weight.detach(), block.bias.detach()) for block in layers],
        network.last.weight.detach()[0],
        float(network.last.bias.detach()),
        provenance,
    )


def passes_budget(passes: int, updates: int) -> Budget:
    """So many passes of so many updates each, as SpecDec++'s authors and Medusa's train: a plain
    Adam with 3 % warm-up."""
    return Budget(
        updates=passes * updates,
        warmup_steps=max(1, round(WARMUP * passes * updates)),
        weight_decay=0.0,
        betas=(0.9, 0.999),
        largest_gradient=math.inf,
        measure_steps=updates,
    )


def best_constant(examples: Examples) -> float:
    """The logit with the least loss among constant predictions."""
    mean = float(labels_of(examples).mean())
    return math.log(max(mean, 1e-6) / max(MISMATCH_WEIGHT * (1 - mean), 1e-6))


def weighted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """−Σ[y·log f + w·(1 − y)·log(1 − f)] / Σ[y + w·(1 − y)], f = sigmoid(logits) (the authors'
    normalisation).

    Args:
        logits, labels: `[rows]` float32, labels in [0, 1].
    """
    rejected = MISMATCH_WEIGHT * (1 - labels)
    total = (labels * softplus(-logits) + rejected * softplus(logits)).sum()
    return total / (labels + rejected).sum()
