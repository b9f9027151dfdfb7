"""Train an EAGLE-3 head on the target's own text, unrolled over its own outputs (arXiv 2503.01840,
section 3).

Loss of a step: KL from the target's distribution over the head's tokens, plus a small cross-entropy
with the target's likeliest token; later steps weigh less. There is no regression of states: what
the head puts out is free, as in the paper. The loop, its budget and its checkpoints are those of
`draftwell.components.train.fit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwell.components.distil.corpus import Conversation, checkpoint_on, hold_out, passes_over
from draftwell.components.distil.divergence import Divergence
from draftwell.components.distil.eagle3.measure import Reach, reach
from draftwell.components.distil.eagle3.network import Eagle3Network
from draftwell.components.distil.eagle3.unroll import Batch, Starts, unroll
from draftwell.components.distil.family import Head
from draftwell.components.train.fit import Budget, Say, fit

SAMPLE = 64
"""Held-out conversations that are measured on during training; all of them at the end."""


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(Budget):
    """How to train a head.

    Args:
        layers: the target's layers whose input states the head reads.
        head_tokens: tokens that the head covers at most.
        steps: tokens that the head is unrolled over.
        decay: weight of a step relative to the one before.
        hard_weight: weight of the cross-entropy with the target's likeliest token.
        prompt_weight: share of the positions in prompts that are learned, at step 0 only; they are
            drawn again each time, which is their weight in the mean.
        noise: of the features in training, uniform up to ± this part of each one's spread.
    """

    layers: tuple[int, ...]
    head_tokens: int = 8192
    steps: int = 4
    decay: float = 0.8
    batch_tokens: int = 1024
    peak_rate: float = 1.5e-3
    final_rate: float = 2e-5
    hard_weight: float = 0.1
    prompt_weight: float = 0.3
    noise: float = 0.1
    seed: int = 0


def head_losses(
    network: Eagle3Network,
    group: Sequence[Conversation],
    head: Head,
    recipe: HeadRecipe,
    spread: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a batch.

    Args:
        head: the target's, over the tokens that are covered.
        spread: `[3 * hidden]` of the features, which noise is measured by.
        generator: draws positions in prompts, and noise.
    Returns:
        scalar loss and its parts: `kl` of each step, as `kl_1`…, and their sum `loss`.
    """
    device = head.weight.device
    batch = Batch.of(group, device)
    # from the first index that predicts a token of the target's
    starts = Starts.of(batch, (batch.prompt - 2).clamp(min=0)[:, None])
    everywhere = torch.arange(batch.indices, device=device)
    drawn = torch.rand(len(batch.ids), batch.indices, generator=generator) < recipe.prompt_weight
    learned = (everywhere >= starts.index[:, :1]) | drawn.to(device)
    noise = torch.rand(batch.features.shape, generator=generator).mul_(2).sub_(1)
    features = batch.features + noise.mul_(recipe.noise * spread)
    states, wanted, weight = list[Tensor](), list[Tensor](), list[Tensor]()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for step, output in enumerate(unroll(network, batch, features, starts, recipe.steps)):
            real = (learned & (everywhere <= starts.last)) if step == 0 else starts.real(step)
            at = real.nonzero(as_tuple=True)
            if not len(at[0]):
                break
            place = (at[1] if step == 0 else starts.index[at]) + 1 + step
            states.append(network.norm(output[at]))
            wanted.append(batch.final[at[0], place])
            share = recipe.decay**step / len(at[0])
            weight.append(torch.full((len(at[0]),), share, device=device))
        loss, each, _ = Divergence(head, "kl", recipe.hard_weight)(
            torch.cat(states), torch.cat(wanted), torch.cat(weight)
        )
    counts = [len(rows) for rows in states]
    parts = {f"kl_{i}": float(kl.mean()) for i, kl in enumerate(each.split(counts), 1)}
    return loss, {"loss": float(loss.detach()), **parts}


def spread_of(corpus: Sequence[Conversation]) -> Tensor:
    """`[3 * hidden]` spread of each feature: half the distance between its 16th and 84th
    percentile, a standard deviation that the outliers of a text's first token do not touch."""
    states = torch.cat([s.hidden[1:] for s in corpus[:: max(1, len(corpus) // 16)][:16]]).float()
    features = states[:, : states.shape[1] // 4 * 3]
    low, high = torch.quantile(features, torch.tensor([0.16, 0.84]), dim=0)
    spread: Tensor = (high - low) / 2
    return spread


def train_head(
    network: Eagle3Network,
    corpus: Sequence[Conversation],
    head: Head,
    recipe: HeadRecipe,
    folder: Path,
    *,
    donor: str,
    say: Say = print,
) -> dict[str, Any]:
    """Train until the budget is used; checkpoints make it resumable, and a finished run that is
    resumed returns at once.

    Args:
        network: a head at its start (`start.start_from_target`).
        corpus: written with the states of `recipe.layers`.
        head: as in `head_losses`.
        folder: of the checkpoint.
        donor: sha256 of the target's weights.
    Returns:
        what `fit` does, with curves of the loss's parts and, on a sample of the held-out
        conversations (2 %), of `Reach.figures`; and on all of these `acceptance` of each depth,
        `accepted_length` (expected tokens of a draft of `recipe.steps`), `positions`, and all of
        them as `metrics`.
    Raises:
        DraftwellError: the checkpoint cannot be read, there is too little text, or training
            diverged.
    """
    # those with a token to draft
    corpus = [s for s in corpus if len(s.ids) > s.prompt + 1 and len(s.ids) > 2]
    held, train_set = hold_out(corpus)
    spread = spread_of(train_set)

    def loss(group: Sequence[Conversation], step: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        return head_losses(network, group, head, recipe, spread, generator)

    def reach_on(held: Sequence[Conversation]) -> Reach:
        return reach(network, held, head, recipe.steps, recipe.batch_tokens)

    progress = fit(
        network,
        loss,
        recipe,
        passes_over(train_set, recipe.batch_tokens, recipe.seed),
        # under names of their own: those of all held-out conversations would be a jump
        measure=lambda: reach_on(held[:SAMPLE]).figures("sample_"),
        checkpoint=checkpoint_on(corpus, folder, recipe, head.ids, donor),
        say=say,
    )
    found = reach_on(held)
    return {
        **progress,
        "acceptance": list(found.depths),
        "accepted_length": found.length,
        "positions": found.positions,
        "metrics": {**found.figures(), "positions": float(found.positions)},
    }
