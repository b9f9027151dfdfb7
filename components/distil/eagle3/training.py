"""Train an EAGLE-3 head on the target's own text, unrolled over its own outputs (arXiv 2503.01840,
section 3).

Loss of a step (`objective`): KL from the target's distribution over the head's tokens, plus a small
cross-entropy with the target's likeliest token; later steps weigh less. There is no regression of
states: what the head puts out is free, as in the paper. The schedule and checkpoints are those of
`draftwell.components.distil.training`: a budget of minutes or of tokens, and a run that was killed
resumes at the same batch of the same pass, under a budget of tokens bit for bit.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwell.components.distil.checkpoint import restore, save
from draftwell.components.distil.corpus import Conversation, batches, corpus_digest, hold_out
from draftwell.components.distil.eagle3.measure import Reach, reach
from draftwell.components.distil.eagle3.network import Eagle3Network
from draftwell.components.distil.eagle3.objective import head_losses, spread_of
from draftwell.components.distil.eagle3.recipe import Borrowed, HeadRecipe
from draftwell.components.distil.training import Log
from draftwell.serving.errors import DraftwellError


def train_head(
    network: Eagle3Network,
    corpus: Sequence[Conversation],
    borrowed: Borrowed,
    recipe: HeadRecipe,
    folder: Path,
    *,
    bound: Mapping[str, str] | None = None,
    log: Log = lambda name, value, step: None,
    say: Callable[[str], None] = print,
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
            conversations, `sample_acceptance_depth_1`…, `sample_acceptance` (their mean) and
            `sample_accepted_length`.
    Returns:
        steps, tokens, minutes, and acceptance on held-out conversations (2 %): `acceptance` of each
        depth, `accepted_length` (expected tokens of a draft of `recipe.steps`), `positions`, and
        the `curve` of accepted lengths during training.
    Raises:
        DraftwellError: the folder's checkpoint belongs to another run, there is too little text, or
            training diverged.
    """
    # those with a token to draft
    corpus = [s for s in corpus if len(s.ids) > s.prompt + 1 and len(s.ids) > 2]
    held, train_set = hold_out(corpus)
    if not train_set:
        raise DraftwellError(
            "the target wrote fewer than two texts to learn from: give more prompts",
            code="too_little_text",
        )
    identity = {
        **(bound or {}),
        **recipe.identity(),
        "corpus": corpus_digest(corpus),
        "head": hashlib.sha256(borrowed.ids.to(torch.int32).cpu().numpy().tobytes()).hexdigest(),
    }
    run = Run(network, borrowed, recipe, held, spread_of(train_set), log, say)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=recipe.peak_rate,
        betas=(0.9, 0.98),
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    progress = restore(
        network, optimizer, folder, identity, absent=HeadRecipe(recipe.layers).identity()
    )
    started, spent, saved = time.monotonic(), progress["minutes"], time.monotonic()
    while recipe.spent(progress) < 1:
        groups = list(
            batches(
                train_set, recipe.batch_tokens, random.Random(f"{recipe.seed}/{progress['passes']}")
            )
        )
        for group in groups[progress["position"] :]:
            run.update(optimizer, group, progress)
            progress["position"] += 1
            progress["steps"] += 1
            progress["tokens"] += sum(len(s.ids) for s in group)
            progress["minutes"] = spent + (time.monotonic() - started) / 60
            if progress["steps"] % recipe.measure_steps == 0:
                run.measure(progress)
            if time.monotonic() - saved >= recipe.save_seconds:
                save(network, optimizer, progress, folder, identity)
                saved = time.monotonic()
            if recipe.spent(progress) >= 1:
                break
        else:
            progress["passes"], progress["position"] = progress["passes"] + 1, 0
    save(network, optimizer, progress, folder, identity)
    found = run.reach(held)
    return {
        **progress,
        "acceptance": list(found.depths),
        "accepted_length": found.length,
        "positions": found.positions,
    }


class Run:
    """One training with what it reads and reports."""

    def __init__(
        self,
        network: Eagle3Network,
        borrowed: Borrowed,
        recipe: HeadRecipe,
        held: Sequence[Conversation],
        spread: Tensor,
        log: Log,
        say: Callable[[str], None],
    ):
        self.network, self.borrowed, self.recipe, self.held, self.spread = (
            network,
            borrowed,
            recipe,
            held,
            spread,
        )
        self.log, self.say, self.shown = log, say, list[dict[str, float]]()
        self.rows = borrowed.rows.bfloat16()

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        group: Sequence[Conversation],
        progress: Mapping[str, Any],
    ) -> None:
        """One optimizer step on one batch; what is drawn depends on the seed and the step alone, so
        that a resumed run draws the same."""
        for slot in optimizer.param_groups:
            slot["lr"] = self.recipe.rate(progress)
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + progress["steps"])
        loss, parts = head_losses(
            self.network, group, self.borrowed, self.rows, self.recipe, self.spread, generator
        )
        if not torch.isfinite(loss):
            raise DraftwellError(
                f"training diverged at step {progress['steps']} (the loss is not finite): "
                "lower the learning rate; "
                "the last checkpoint is sound",
                code="training_diverged",
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        optimizer.step()
        self.shown.append(parts)

    def reach(self, held: Sequence[Conversation]) -> Reach:
        """Acceptance on some of the held-out conversations."""
        return reach(
            self.network,
            held,
            self.borrowed.embeddings,
            self.borrowed.rows,
            self.borrowed.ids,
            self.recipe.steps,
            self.recipe.batch_tokens,
        )

    def measure(self, progress: dict[str, Any]) -> None:
        """Report how far training is."""
        found = self.reach(self.held[: self.recipe.measured])
        progress["curve"].append([progress["steps"], found.length])
        means = {
            name: sum(p.get(name, 0.0) for p in self.shown) / len(self.shown)
            for name in self.shown[-1]
        }
        self.shown.clear()
        for name, value in means.items():
            self.log(name, value, progress["steps"])
        self.tell(found, progress["steps"])
        self.say(
            f"step {progress['steps']}  {progress['minutes']:.1f} min  "
            f"{progress['tokens'] / 1e6:.2f} M tokens  "
            f"loss {means['loss']:.3f}  acceptance "
            f"{' '.join(f'{share:.3f}' for share in found.depths)}  "
            f"accepted {found.length:.2f} of {self.recipe.steps}"
        )

    def tell(self, found: Reach, step: int) -> None:
        """Log acceptance of the sample. That of all held-out conversations, which the artifact has
        without the prefix, would be a jump."""
        for depth, share in enumerate(found.depths, 1):
            self.log(f"sample_acceptance_depth_{depth}", share, step)
        self.log("sample_acceptance", found.mean, step)
        self.log("sample_accepted_length", found.length, step)
