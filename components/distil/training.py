"""Distil a small draft from a target: keep a few layers, train them on the target's own text.

The draft borrows the target's embeddings and head (frozen), so only the kept layers and norms are
learned. Loss: KL or total variation (DistillSpec, arXiv 2310.08461, section 3) from the target's
distribution over the head's tokens, plus a small regression of the last hidden state, which gives
every position a dense signal (as EAGLE's feature loss does, arXiv 2401.15077). The schedule is a
cosine over a budget of minutes, so that a run ends on time on any machine, or of tokens, so that it
ends with the same weights every time.

A run that was killed resumes from its last checkpoint, at the same batch of the same pass. Under a
budget of tokens, on the same machine and number of threads, it ends with the weights of an unbroken
run, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.components.distil.checkpoint import restore, save
from draftwell.components.distil.corpus import (
    Conversation,
    batches,
    corpus_digest,
    frequent_tokens,
    hold_out,
)
from draftwell.components.distil.family import Head
from draftwell.serving.errors import DraftwellError

Log = Callable[[str, float, int], None]


class Schedule:
    """A budget of minutes or tokens, and the learning rate over it; recipes bring the settings."""

    minutes: float
    tokens: int | None
    peak_rate: float
    final_rate: float
    warmup_steps: int

    def spent(self, progress: Mapping[str, float]) -> float:
        """Share of the budget that is used up."""
        return (
            progress["tokens"] / self.tokens
            if self.tokens is not None
            else progress["minutes"] / self.minutes
        )

    def rate(self, progress: Mapping[str, float]) -> float:
        """Learning rate of the next step: a cosine over the budget, after a linear warm-up."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.spent(progress))))
        return (self.final_rate + (self.peak_rate - self.final_rate) * cosine) * min(
            1.0, (progress["steps"] + 1) / self.warmup_steps
        )


@dataclass(frozen=True)
class Recipe(Schedule):
    """How to train.

    Args:
        layers: numbers of the target's layers that are kept.
        head_tokens: tokens that the head covers at most.
        loss: KL(target ‖ draft), or total variation ½ Σ |p − q|, which is one minus the chance of
            acceptance.
        minutes: training time of this run and all runs that it resumes; ignored where `tokens` is
            given.
        tokens: tokens to train on, each as often as it is seen.
        hard_weight: weight of the target's own choice as a label, under KL only.
        prompt_weight: weight of a position in a prompt relative to one in the target's own text:
            prompts cost nothing and reduce overfitting, but drafts are judged on the target's text.
        save_seconds: time between two checkpoints.
        measure_steps: steps between two measurements of held-out agreement.
    """

    layers: tuple[int, ...] = (0, 1, 28, 29)
    head_tokens: int = 8192
    loss: Literal["kl", "tv"] = "kl"
    minutes: float = 60.0
    tokens: int | None = None
    batch_tokens: int = 2048
    peak_rate: float = 6e-4
    final_rate: float = 2e-5
    warmup_steps: int = 60
    weight_decay: float = 0.01
    hidden_weight: float = 0.3
    hard_weight: float = 0.3
    prompt_weight: float = 0.3
    seed: int = 0
    save_seconds: float = 300.0
    measure_steps: int = 200


def losses(
    draft: Any, group: Sequence[Conversation], head: Head, recipe: Recipe
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a batch.

    Returns:
        scalar loss and its parts: `kl` or `tv`, `hidden` (share of the states' variance) and
            `agreement`, the share of
        output positions whose argmax equals the target's.
    """
    device = draft.device
    width = max(len(s.ids) for s in group)
    ids = torch.stack([F.pad(s.ids, (0, width - len(s.ids))) for s in group]).to(device)
    # the target's own text
    written = torch.cat([torch.arange(1, len(s.ids) - 1) >= s.prompt - 1 for s in group]).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        # padding comes after what counts
        states = draft.base_model(input_ids=ids, use_cache=False).last_hidden_state
        mine = torch.cat([states[i, 1 : len(s.ids) - 1] for i, s in enumerate(group)])
        wanted = torch.cat([s.hidden[1:] for s in group]).to(device)
        logits, target = head(mine), head(wanted)
    hidden = F.mse_loss(mine.float(), wanted.float()) / wanted.float().var()
    guess = logits.log_softmax(-1)
    weight = torch.where(written, 1.0, recipe.prompt_weight)
    weight = weight / weight.sum()
    # the target's choice, which is the text itself where the target wrote it
    labels = target.argmax(-1)
    if recipe.loss == "kl":
        soft = (
            F.kl_div(guess, target.log_softmax(-1), log_target=True, reduction="none").sum(-1)
            * weight
        ).sum()
        loss = (
            soft + recipe.hard_weight * (F.nll_loss(guess, labels, reduction="none") * weight).sum()
        )
    else:
        loss = soft = (0.5 * (guess.exp() - target.softmax(-1)).abs().sum(-1) * weight).sum()
    loss = loss + recipe.hidden_weight * hidden
    agreement = (logits.argmax(-1) == labels)[written].float().mean()
    return loss, {recipe.loss: soft.item(), "hidden": hidden.item(), "agreement": agreement.item()}


def train_draft(
    draft: Any,
    corpus: Sequence[Conversation],
    head: Head,
    recipe: Recipe,
    folder: Path,
    *,
    bound: Mapping[str, str] | None = None,
    log: Log = lambda name, value, step: None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train until the budget is used; checkpoints make it resumable, and a finished run that is
    resumed returns at once.

    Args:
        draft: of `keep_layers`.
        folder: of the checkpoint.
        bound: further identity of the run, such as the target's digest; a checkpoint of a different
            run is refused.
        log: called with the loss's parts and `held_out_agreement` during training.
    Returns:
        steps, tokens, minutes, and agreement on held-out conversations (2 %): `held_out_agreement`
        and its `curve` during training (pairs of step and agreement).
    Raises:
        DraftwellError: the folder's checkpoint belongs to another run, or there is too little text.
    """
    corpus = [s for s in corpus if len(s.ids) > 2]  # the first token's state is never learned
    held, train_set = hold_out(corpus)
    if not train_set:
        raise DraftwellError(
            "the target wrote fewer than two texts to learn from: give more prompts",
            code="too_little_text",
        )
    identity = {
        **(bound or {}),
        "layers": ",".join(map(str, recipe.layers)),
        "loss": recipe.loss,
        "head": hashlib.sha256(head.ids.to(torch.int32).cpu().numpy().tobytes()).hexdigest(),
        "corpus": corpus_digest(corpus),
    }
    trained = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=recipe.peak_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
    )
    progress = restore(draft, optimizer, folder, identity)
    started, spent, saved, shown = (
        time.monotonic(),
        progress["minutes"],
        time.monotonic(),
        list[dict[str, float]](),
    )
    while recipe.spent(progress) < 1:
        groups = list(
            batches(
                train_set, recipe.batch_tokens, random.Random(f"{recipe.seed}/{progress['passes']}")
            )
        )
        for group in groups[progress["position"] :]:
            parts = update(draft, optimizer, group, head, recipe, progress)
            progress["position"] += 1
            progress["steps"] += 1
            progress["tokens"] += sum(len(s.ids) for s in group)
            progress["minutes"] = spent + (time.monotonic() - started) / 60
            shown.append(parts)
            if progress["steps"] % recipe.measure_steps == 0:
                mean = {name: sum(p[name] for p in shown) / len(shown) for name in parts}
                measure(draft, held, head, recipe, progress, mean, log, say)
                shown.clear()
            if time.monotonic() - saved >= recipe.save_seconds:
                save(draft, optimizer, progress, folder, identity)
                saved = time.monotonic()
            if recipe.spent(progress) >= 1:
                break
        else:
            progress["passes"], progress["position"] = progress["passes"] + 1, 0
    save(draft, optimizer, progress, folder, identity)
    final = held_out(draft, held, head, recipe)
    log("held_out_agreement", final, progress["steps"])
    return {**progress, "held_out_agreement": final}


def update(
    draft: Any,
    optimizer: torch.optim.Optimizer,
    group: Sequence[Conversation],
    head: Head,
    recipe: Recipe,
    progress: Mapping[str, Any],
) -> dict[str, float]:
    """One optimizer step on one batch; returns the parts of its loss."""
    for slot in optimizer.param_groups:
        slot["lr"] = recipe.rate(progress)
    loss, parts = losses(draft, group, head, recipe)
    if not torch.isfinite(loss):
        raise DraftwellError(
            f"training diverged at step {progress['steps']} (the loss is not finite): try "
            "--dtype float32; "
            "the last checkpoint is sound",
            code="training_diverged",
        )
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(
        [p for slot in optimizer.param_groups for p in slot["params"]], 1.0
    )
    optimizer.step()
    return parts


def measure(
    draft: Any,
    held: Sequence[Conversation],
    head: Head,
    recipe: Recipe,
    progress: dict[str, Any],
    means: Mapping[str, float],
    log: Log,
    say: Callable[[str], None],
) -> None:
    """Report how far training is, and agreement with the target on held-out conversations."""
    found = held_out(draft, held, head, recipe)
    progress["curve"].append([progress["steps"], found])
    for name, value in {**means, "held_out_agreement": found}.items():
        log(name, value, progress["steps"])
    say(
        (
            f"step {progress['steps']}  {progress['minutes']:.1f} min  "
            f"{progress['tokens'] / 1e6:.2f} M tokens  "
        )
        + "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        + f"  held-out agreement {found:.3f}"
    )


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
