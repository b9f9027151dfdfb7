"""The loss of a batch: KL from the target's distribution at every step of the unrolled head (arXiv
2503.01840, section 3).

Each step has its own positions; the target's distribution over the head's tokens is computed once
for each of the target's positions, and every step looks up the one it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwell.components.distil.corpus import Conversation
from draftwell.components.distil.eagle3.loss import Wanted, divergence
from draftwell.components.distil.eagle3.network import Eagle3Network
from draftwell.components.distil.eagle3.recipe import Borrowed, HeadRecipe
from draftwell.components.distil.eagle3.unroll import Batch, Starts, unroll


def head_losses(
    network: Eagle3Network,
    group: Sequence[Conversation],
    borrowed: Borrowed,
    rows: Tensor,
    recipe: HeadRecipe,
    spread: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a batch.

    Args:
        rows: `borrowed.rows` as products read them, bfloat16.
        spread: `[3 * hidden]` of the features, which noise is measured by.
        generator: draws noise, positions in prompts, and conversations for later steps.
    Returns:
        scalar loss and its parts: `kl` of each step, as `kl_1`…, and their sum `loss`.
    """
    batch = Batch.of(group, rows.device)
    first = (batch.prompt - 2).clamp(min=0)  # the first index that predicts a token of the target's
    count = max(1, round(recipe.deeper_share * len(group)))
    starts = Starts.of(
        batch, torch.randperm(len(group), generator=generator)[:count].sort().values, first
    )
    place, wanted, learned = targets(batch, first, rows, recipe, generator)
    noise = (
        torch.rand(batch.features.shape, generator=generator, dtype=torch.float32)
        .mul_(2)
        .sub_(1)
        .mul_(recipe.noise * spread)
    )
    loss, parts = torch.zeros((), device=rows.device), dict[str, float]()
    with torch.autocast(rows.device.type, dtype=torch.bfloat16):
        for step, output in enumerate(
            unroll(
                network, batch, batch.features + noise, borrowed.embeddings, starts, recipe.steps
            )
        ):
            at = learned if step == 0 else starts.real(step).nonzero(as_tuple=True)
            if not len(at[0]):
                break
            compared = (
                place[at[0], at[1] + 1]
                if step == 0
                else place[starts.rows[at[0]], starts.index[at] + 1 + step]
            )
            mean, soft, _ = divergence(
                network.norm(output[at]), rows, wanted, compared, recipe.hard_weight
            )
            loss = loss + recipe.decay**step * mean
            parts[f"kl_{step + 1}"] = soft
    return loss, {"loss": float(loss.detach()), **parts}


def targets(
    batch: Batch, first: Tensor, rows: Tensor, recipe: HeadRecipe, generator: torch.Generator
) -> tuple[Tensor, Wanted, tuple[Tensor, ...]]:
    """The target's distributions that a batch is compared with.

    Returns:
        `[batch, width - 1]` the number of each position's distribution, the distributions, and the
        learned indices of step 0 as pairs of row and index.
    """
    everywhere = torch.arange(batch.indices, device=rows.device)
    drawn = torch.rand(len(batch.ids), batch.indices, generator=generator) < recipe.prompt_weight
    learned = ((everywhere >= first[:, None]) | drawn.to(rows.device)) & (
        everywhere <= batch.total[:, None] - 3
    )
    at = learned.nonzero(as_tuple=True)
    place = torch.full((len(batch.ids), batch.indices + 1), -1, device=rows.device)
    place[at[0], at[1] + 1] = torch.arange(len(at[0]), device=rows.device)
    return place, Wanted.of(batch.final[at[0], at[1] + 1], rows), at


def spread_of(corpus: Sequence[Conversation]) -> Tensor:
    """`[3 * hidden]` spread of each feature: half the distance between its 16th and 84th
    percentile, a standard deviation that the outliers of a text's first token do not touch."""
    states = torch.cat([s.hidden[1:] for s in corpus[:: max(1, len(corpus) // 16)][:16]]).float()
    features = states[:, : states.shape[1] // 4 * 3]
    low, high = torch.quantile(features, torch.tensor([0.16, 0.84]), dim=0)
    spread: Tensor = (high - low) / 2
    return spread
