"""Train an EAGLE-3 head on the target's own text, unrolled over its own outputs (arXiv 2503.01840,
section 3).

Loss of a step (`objective`): KL from the target's distribution over the head's tokens, plus a small
cross-entropy with the target's likeliest token; later steps weigh less. There is no regression of
states: what the head puts out is free, as in the paper. The loop, its budget and its checkpoints
are those of `draftwell.components.train.fit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwell.components.distil.corpus import (
    Conversation,
    corpus_digest,
    digest_of_ids,
    hold_out,
    passes_over,
)
from draftwell.components.distil.eagle3.measure import Reach, reach
from draftwell.components.distil.eagle3.network import Eagle3Network
from draftwell.components.distil.eagle3.objective import head_losses, spread_of
from draftwell.components.distil.eagle3.recipe import Borrowed, HeadRecipe
from draftwell.components.train.checkpoint import Checkpoint
from draftwell.components.train.fit import Log, Say, fit, silent


def train_head(
    network: Eagle3Network,
    corpus: Sequence[Conversation],
    borrowed: Borrowed,
    recipe: HeadRecipe,
    folder: Path,
    *,
    bound: Mapping[str, str] | None = None,
    log: Log = silent,
    say: Say = print,
) -> dict[str, Any]:
    """Train until the budget is used; checkpoints make it resumable, and a finished run that is
    resumed returns at once.

    Args:
        network: a head at its start (`start.start_from_target`).
        corpus: written with the states of `recipe.layers`.
        folder: of the checkpoint.
        bound: further identity of the run, such as the target's digest; a checkpoint of a different
            run is refused.
        log: called during training with the loss's parts and, of a sample of the held-out
            conversations, the figures of `sample_figures`.
    Returns:
        what `fit` does, and acceptance on held-out conversations (2 %): `acceptance` of each depth,
        `accepted_length` (expected tokens of a draft of `recipe.steps`) and `positions`.
    Raises:
        DraftwellError: the folder's checkpoint belongs to another run, there is too little text, or
            training diverged.
    """
    # those with a token to draft
    corpus = [s for s in corpus if len(s.ids) > s.prompt + 1 and len(s.ids) > 2]
    held, train_set = hold_out(corpus)
    spread, rows = spread_of(train_set), borrowed.rows.bfloat16()

    def loss(group: Sequence[Conversation], step: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        return head_losses(network, group, borrowed, rows, recipe, spread, generator)

    def reach_on(held: Sequence[Conversation]) -> Reach:
        return reach(network, held, borrowed, recipe.steps, recipe.batch_tokens)

    progress = fit(
        network,
        loss,
        recipe,
        passes_over(train_set, recipe.batch_tokens, recipe.seed),
        measure=lambda: sample_figures(reach_on(held[: recipe.measured])),
        checkpoint=Checkpoint(folder, identity_of(recipe, corpus, borrowed, bound or {})),
        log=log,
        say=say,
    )
    found = reach_on(held)
    return {
        **progress,
        "acceptance": list(found.depths),
        "accepted_length": found.length,
        "positions": found.positions,
    }


def identity_of(
    recipe: HeadRecipe,
    corpus: Sequence[Conversation],
    borrowed: Borrowed,
    bound: Mapping[str, str],
) -> dict[str, str]:
    """What a checkpoint belongs to."""
    return {
        **bound,
        **recipe.identity(),
        "corpus": corpus_digest(corpus),
        "head": digest_of_ids(borrowed.ids),
    }


def sample_figures(found: Reach) -> dict[str, float]:
    """Acceptance of the sample, under names of its own: that of all held-out conversations, which
    the artifact has, would be a jump."""
    depths = {
        f"sample_acceptance_depth_{depth}": share for depth, share in enumerate(found.depths, 1)
    }
    return {**depths, "sample_acceptance": found.mean, "sample_accepted_length": found.length}
