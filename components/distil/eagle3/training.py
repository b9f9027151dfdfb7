"""Train an EAGLE-3 head on the target's own text, unrolled over its own outputs (arXiv 2503.01840, section 3).

Loss of a step: KL from the target's distribution over the head's tokens, plus a small cross-entropy with the target's likeliest
token; later steps weigh less. There is no regression of states: what the head puts out is free, as in the paper. The schedule and
checkpoints are those of `components.distil.training`: a budget of minutes or of tokens, and a run that was killed resumes at the same
batch of the same pass, under a budget of tokens bit for bit.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.distil.checkpoint import restore, save
from components.distil.corpus import Conversation, batches, corpus_digest
from components.distil.eagle3.loss import Wanted, divergence
from components.distil.eagle3.measure import Reach, reach
from components.distil.eagle3.network import Eagle3Network
from components.distil.eagle3.unroll import Batch, Starts, unroll
from components.distil.training import Log, Schedule
from serving.errors import DraftwellError


@dataclass(frozen=True)
class HeadRecipe(Schedule):
    """How to train a head.

    Args:
        layers: the target's layers whose input states the head reads.
        head_tokens: tokens that the head covers at most.
        steps: tokens that the head is unrolled over.
        decay: weight of a step relative to the one before.
        deeper_share: share of a batch's conversations that steps after the first are computed for.
        minutes: training time of this run and all runs that it resumes; ignored where `tokens` is given.
        tokens: tokens to train on, each as often as it is seen.
        hard_weight: weight of the cross-entropy with the target's likeliest token.
        prompt_weight: share of the positions in prompts that are learned, at step 0 only; they are drawn anew each time, which is
            their weight in the mean.
        noise: of the features in training, uniform up to ± this part of each one's spread.
        save_seconds: time between two checkpoints.
        measure_steps: steps between two measurements of held-out acceptance.
        measured: held-out conversations that are measured on during training; all of them at the end.
    """

    layers: tuple[int, ...]
    head_tokens: int = 8192
    steps: int = 4
    decay: float = 0.8
    deeper_share: float = 1.0
    minutes: float = 60.0
    tokens: int | None = None
    batch_tokens: int = 2048
    peak_rate: float = 6e-4
    final_rate: float = 2e-5
    warmup_steps: int = 60
    weight_decay: float = 0.01
    hard_weight: float = 0.1
    prompt_weight: float = 0.1
    noise: float = 0.1
    seed: int = 0
    save_seconds: float = 300.0
    measure_steps: int = 200
    measured: int = 64


@dataclass(frozen=True)
class Borrowed:
    """What a head reads of its target and does not own.

    Args:
        embeddings: `[vocab, hidden]` of tokens.
        ids: `[head]` tokens that the head covers, ascending.
        rows: `[head, hidden]` float32, their rows of the output embedding.
    """

    embeddings: Tensor
    ids: Tensor
    rows: Tensor

    @classmethod
    def of(cls, target: Any, ids: Tensor) -> Borrowed:
        """From the target's module."""
        output = target.get_output_embeddings().weight.detach()
        return cls(target.get_input_embeddings().weight.detach(), ids, output[ids.to(output.device)].float())


def head_losses(network: Eagle3Network, group: Sequence[Conversation], borrowed: Borrowed, rows: Tensor, recipe: HeadRecipe, spread: Tensor,
                generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
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
    starts = Starts.of(batch, torch.randperm(len(group), generator=generator)[:count].sort().values, first)
    place, wanted, learned = targets(batch, first, rows, recipe, generator)
    noise = torch.rand(batch.features.shape, generator=generator, dtype=torch.float32).mul_(2).sub_(1).mul_(recipe.noise * spread)
    loss, parts = torch.zeros((), device=rows.device), dict[str, float]()
    with torch.autocast(rows.device.type, dtype=torch.bfloat16):
        for step, output in enumerate(unroll(network, batch, batch.features + noise, borrowed.embeddings, starts, recipe.steps)):
            at = learned if step == 0 else starts.real(step).nonzero(as_tuple=True)
            if not len(at[0]):
                break
            compared = place[at[0], at[1] + 1] if step == 0 else place[starts.rows[at[0]], starts.index[at] + 1 + step]
            mean, soft, _ = divergence(network.norm(output[at]), rows, wanted, compared, recipe.hard_weight)
            loss = loss + recipe.decay**step * mean
            parts[f"kl_{step + 1}"] = soft
    return loss, {"loss": float(loss.detach()), **parts}


def targets(batch: Batch, first: Tensor, rows: Tensor, recipe: HeadRecipe,
            generator: torch.Generator) -> tuple[Tensor, Wanted, tuple[Tensor, ...]]:
    """The target's distributions that a batch is compared with.

    Returns:
        `[batch, width - 1]` the number of each position's distribution, the distributions, and the learned indices of step 0 as
        pairs of row and index.
    """
    everywhere = torch.arange(batch.indices, device=rows.device)
    drawn = torch.rand(len(batch.ids), batch.indices, generator=generator) < recipe.prompt_weight
    learned = ((everywhere >= first[:, None]) | drawn.to(rows.device)) & (everywhere <= batch.total[:, None] - 3)
    at = learned.nonzero(as_tuple=True)
    place = torch.full((len(batch.ids), batch.indices + 1), -1, device=rows.device)
    place[at[0], at[1] + 1] = torch.arange(len(at[0]), device=rows.device)
    return place, Wanted.of(batch.final[at[0], at[1] + 1], rows), at


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
    """Train until the budget is used; checkpoints make it resumable, and a finished run that is resumed returns at once.

    Args:
        network: a head at its start (`start.start_from_target`).
        corpus: written with the states of `recipe.layers`.
        folder: of the checkpoint.
        bound: further identity of the run, such as the target's digest; a checkpoint of a different run is refused.
        log: called with the loss's parts, `acceptance_depth_1`…, `acceptance` (their mean) and `accepted_length`.
    Returns:
        steps, tokens, minutes, and acceptance on held-out conversations (2 %): `acceptance` of each depth, `accepted_length` (expected
        tokens of a draft of `recipe.steps`), `positions`, and the `curve` of accepted lengths during training.
    Raises:
        DraftwellError: the folder's checkpoint belongs to another run, there is too little text, or training diverged.
    """
    corpus = [s for s in corpus if len(s.ids) > s.prompt + 1 and len(s.ids) > 2]  # those with a token to draft
    held, train_set = corpus[::50], [s for i, s in enumerate(corpus) if i % 50]
    if not train_set:
        raise DraftwellError("the target wrote fewer than two texts to learn from: give more prompts", code="too_little_text")
    identity = {**(bound or {}), "layers": ",".join(map(str, recipe.layers)), "steps": str(recipe.steps), "corpus": corpus_digest(corpus),
                "head": hashlib.sha256(borrowed.ids.to(torch.int32).cpu().numpy().tobytes()).hexdigest()}
    run = Run(network, borrowed, recipe, held, spread_of(train_set), log, say)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.peak_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay,
                                  fused=True)
    progress = restore(network, optimizer, folder, identity)
    started, spent, saved = time.monotonic(), progress["minutes"], time.monotonic()
    while recipe.spent(progress) < 1:
        groups = list(batches(train_set, recipe.batch_tokens, random.Random(f"{recipe.seed}/{progress['passes']}")))
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
    run.tell(found, progress["steps"])
    return {**progress, "acceptance": list(found.depths), "accepted_length": found.length, "positions": found.positions}


class Run:
    """One training with what it reads and reports."""

    def __init__(self, network: Eagle3Network, borrowed: Borrowed, recipe: HeadRecipe, held: Sequence[Conversation], spread: Tensor,
                 log: Log, say: Callable[[str], None]):
        self.network, self.borrowed, self.recipe, self.held, self.spread = network, borrowed, recipe, held, spread
        self.log, self.say, self.shown = log, say, list[dict[str, float]]()
        self.rows = borrowed.rows.bfloat16()

    def update(self, optimizer: torch.optim.Optimizer, group: Sequence[Conversation], progress: Mapping[str, Any]) -> None:
        """One optimizer step on one batch; what is drawn depends on the seed and the step alone, so that a resumed run draws the same."""
        for slot in optimizer.param_groups:
            slot["lr"] = self.recipe.rate(progress)
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + progress["steps"])
        loss, parts = head_losses(self.network, group, self.borrowed, self.rows, self.recipe, self.spread, generator)
        if not torch.isfinite(loss):
            raise DraftwellError(f"training diverged at step {progress['steps']} (the loss is not finite): lower the learning rate; "
                                 "the last checkpoint is sound", code="training_diverged")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        optimizer.step()
        self.shown.append(parts)

    def reach(self, held: Sequence[Conversation]) -> Reach:
        """Acceptance on some of the held-out conversations."""
        return reach(self.network, held, self.borrowed.embeddings, self.borrowed.rows, self.borrowed.ids, self.recipe.steps,
                     self.recipe.batch_tokens)

    def measure(self, progress: dict[str, Any]) -> None:
        """Report how far training is."""
        found = self.reach(self.held[: self.recipe.measured])
        progress["curve"].append([progress["steps"], found.length])
        means = {name: sum(p.get(name, 0.0) for p in self.shown) / len(self.shown) for name in self.shown[-1]}
        self.shown.clear()
        for name, value in means.items():
            self.log(name, value, progress["steps"])
        self.tell(found, progress["steps"])
        self.say(f"step {progress['steps']}  {progress['minutes']:.1f} min  {progress['tokens'] / 1e6:.2f} M tokens  loss {means['loss']:.3f}"
                 f"  acceptance {' '.join(f'{share:.3f}' for share in found.depths)}  accepted {found.length:.2f} of {self.recipe.steps}")

    def tell(self, found: Reach, step: int) -> None:
        """Log acceptance."""
        for depth, share in enumerate(found.depths, 1):
            self.log(f"acceptance_depth_{depth}", share, step)
        self.log("acceptance", found.mean, step)
        self.log("accepted_length", found.length, step)


def spread_of(corpus: Sequence[Conversation]) -> Tensor:
    """`[3 * hidden]` spread of each feature: half the distance between its 16th and 84th percentile, a standard deviation that the
    outliers of a text's first token do not touch."""
    states = torch.cat([s.hidden[1:] for s in corpus[:: max(1, len(corpus) // 16)][:16]]).float()
    features = states[:, : states.shape[1] // 4 * 3]
    low, high = torch.quantile(features, torch.tensor([0.16, 0.84]), dim=0)
    spread: Tensor = (high - low) / 2
    return spread
