"""Distil a small draft from a target: keep a few layers, train them on the target's own text.

The draft borrows the target's embeddings and head (frozen), so only the kept layers and norms are
learned. Loss: KL or total variation (DistillSpec, arXiv 2310.08461, section 3) from the target's
distribution over the head's tokens, plus a small regression of the last hidden state, which gives
every position a dense signal (as EAGLE's feature loss does, arXiv 2401.15077). The loop, its budget
and its checkpoints are those of `draftwell.components.train.fit`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.components.distil.corpus import (
    Conversation,
    batches,
    checkpoint_on,
    frequent_tokens,
    hold_out,
    padded,
    passes_over,
)
from draftwell.components.distil.divergence import Divergence
from draftwell.components.distil.family import Head
from draftwell.components.train.fit import Budget, Say, fit
from draftwell.serving.runtime.model_files import context_within


@dataclass(frozen=True, kw_only=True)
class Recipe(Budget):
    """How to train.

    Args:
        layers: numbers of the target's layers that are kept; `distill` takes
            `family.default_layers` where there are none.
        head_tokens: tokens that the head covers at most.
        loss: KL(target ‖ draft), or total variation ½ Σ |p − q|, which is one minus the chance of
            acceptance.
        hard_weight: weight of the target's own choice as a label, under KL only.
        prompt_weight: weight of a position in a prompt relative to one in the target's own text:
            prompts cost nothing and reduce overfitting, but drafts are judged on the target's text.
    """

    layers: tuple[int, ...] = ()
    head_tokens: int = 8192
    loss: Literal["kl", "tv"] = "kl"
    batch_tokens: int = 2048
    peak_rate: float = 6e-4
    final_rate: float = 2e-5
    hidden_weight: float = 0.3
    hard_weight: float = 0.3
    prompt_weight: float = 0.3
    seed: int = 0


def losses(
    draft: Any, group: Sequence[Conversation], head: Head, recipe: Recipe
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a batch.

    Returns:
        scalar loss and its parts: `kl` or `tv`, `hidden` (share of the states' variance) and
        `agreement`, the share of output positions whose argmax equals the target's.
    """
    device = draft.device
    # padding comes after what counts
    ids = padded([s.ids for s in group], most=context_within(draft.config, 2**31)).to(device)
    # the target's own text
    written = torch.cat([torch.arange(1, len(s.ids) - 1) >= s.prompt - 1 for s in group]).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        states = draft.base_model(input_ids=ids, use_cache=False).last_hidden_state
        mine = torch.cat([states[i, 1 : len(s.ids) - 1] for i, s in enumerate(group)])
        wanted = torch.cat([s.hidden[1:, -mine.shape[-1] :] for s in group]).to(device)
        weight = torch.where(written, 1.0, recipe.prompt_weight)
        weight = weight / weight.sum()
        divergence = Divergence(head, recipe.loss, recipe.hard_weight)
        loss, each, same = divergence(mine, wanted, weight)
    hidden = F.mse_loss(mine.float(), wanted.float()) / wanted.float().var()
    return loss + recipe.hidden_weight * hidden, {
        recipe.loss: (each * weight).sum().item(),
        "hidden": hidden.item(),
        "agreement": same[written].float().mean().item(),
    }


def train_draft(
    draft: Any,
    corpus: Sequence[Conversation],
    head: Head,
    recipe: Recipe,
    folder: Path,
    *,
    donor: str,
    say: Say = print,
) -> dict[str, Any]:
    """Train until the budget is used; checkpoints make it resumable, and a finished run that is
    resumed returns at once.

    Args:
        draft: of `keep_layers`.
        folder: of the checkpoint.
        donor: sha256 of the target's weights.
    Returns:
        what `fit` does, with curves of the loss's parts and `held_out_agreement`, that on held-out
        conversations (2 %), and its value at the end.
    Raises:
        DraftwellError: the checkpoint cannot be read, or there is too little text.
    """
    corpus = [s for s in corpus if len(s.ids) > 2]  # the first token's state is never learned
    held, train_set = hold_out(corpus)
    progress = fit(
        draft,
        lambda group, _: losses(draft, group, head, recipe),
        recipe,
        passes_over(train_set, recipe.batch_tokens, recipe.seed),
        measure=lambda: {"held_out_agreement": held_out(draft, held, head, recipe)},
        checkpoint=checkpoint_on(corpus, folder, recipe, head.ids, donor),
        say=say,
    )
    return {**progress, "held_out_agreement": held_out(draft, held, head, recipe)}


def head_of(
    corpus: Sequence[Conversation], module: Any, count: int, vocab: int | None = None
) -> Head:
    """The target's head over the tokens that it emits most.

    Args:
        module: the target.
        vocab: ids below this may be covered; None takes all rows of the head.
    """
    rows = module.get_output_embeddings().weight.shape[0]
    return Head.of(module, frequent_tokens(corpus, count, min(rows, vocab or rows)))


@torch.no_grad()
def held_out(draft: Any, held: Sequence[Conversation], head: Head, recipe: Recipe) -> float:
    """Top-1 agreement on conversations that are not trained on, weighted by batch."""
    shares = [
        losses(draft, g, head, recipe)[1]["agreement"]
        for g in batches(held, recipe.batch_tokens, random.Random(0))
    ]
    return sum(shares) / len(shares)
