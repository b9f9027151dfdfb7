"""The acceptance head's network, loss and training loop (SpecDec++, 2405.19715, section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from draftwell.components.train.examples import Examples
from draftwell.components.train.head_examples import labels_of
from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.base import Provenance

Log = Callable[[str, float, int], None]

EPOCHS = 3
RATE, BATCH, WARMUP = 1e-3, 16, 0.03


class HeadTrainingSettings(BaseModel):
    """How an acceptance head is trained."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    blocks: int = Field(
        1,
        ge=0,
        description="D, residual blocks; 1 as in the authors' script (their best results are of 3, "
        "which are "
        "slower on a CPU)",
    )
    mixing: float = Field(
        0.15, ge=0, lt=1, description="share of target tokens in what the draft reads"
    )
    mismatch_weight: float = Field(6.0, gt=0, description="weight of 1 − label in the loss")
    seed: int = Field(0, description="of the split by prompt, the mixture and the training")


class Network(nn.Module):
    """The head during training: D blocks x + SiLU(W x + b) and a linear layer, on standardised
    states.

    Args:
        first_logit: the prediction before training.
    """

    def __init__(self, width: int, blocks: int, first_logit: float):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.last = nn.Linear(width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, first_logit)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + nn.functional.silu(block(x))
        logits: Tensor = self.last(x).squeeze(-1)
        return logits


def fit(
    train: Examples, settings: HeadTrainingSettings, provenance: Provenance, log: Log | None = None
) -> AcceptanceHead:
    """Train for `EPOCHS` epochs; the same settings and examples give the same head."""
    x = torch.from_numpy(train.features(("after",)))
    y = torch.from_numpy(labels_of(train))
    mean, scale = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    x = (x - mean) / scale
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = Network(
            x.shape[1], settings.blocks, best_constant(train, settings.mismatch_weight)
        )
    optimiser = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.0)
    steps = EPOCHS * math.ceil(len(x) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_at(step, steps))
    for epoch in range(EPOCHS):
        total = 0.0
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            optimiser.zero_grad()
            loss = weighted_loss(network(x[rows]), y[rows], settings.mismatch_weight)
            loss.backward()
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(rows)
        if log:
            log("loss", total / len(x), epoch)
    blocks: list[Any] = list(network.blocks)
    layers = [(block.weight.detach(), block.bias.detach()) for block in blocks]
    return AcceptanceHead(
        mean,
        scale,
        layers,
        network.last.weight.detach()[0],
        float(network.last.bias.detach()),
        provenance,
    )


def best_constant(examples: Examples, mismatch_weight: float) -> float:
    """The logit with the least loss among constant predictions."""
    mean = float(labels_of(examples).mean())
    return math.log(max(mean, 1e-6) / max(mismatch_weight * (1 - mean), 1e-6))


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: linear warm-up over the first steps, then a cosine to 0."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def weighted_loss(logits: Tensor, labels: Tensor, mismatch_weight: float) -> Tensor:
    """−Σ[y·log f + w·(1 − y)·log(1 − f)] / Σ[y + w·(1 − y)], f = sigmoid(logits) (the authors'
    normalisation).

    Args:
        logits, labels: `[rows]` float32, labels in [0, 1].
    """
    rejected = mismatch_weight * (1 - labels)
    total = (
        labels * nn.functional.softplus(-logits) + rejected * nn.functional.softplus(logits)
    ).sum()
    return total / (labels + rejected).sum()
