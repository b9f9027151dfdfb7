"""Distil a small draft from a target: keep a few layers, train them on the target's own text.

The draft borrows the target's embeddings and head (frozen), so only the kept layers and norms are learned. Loss: KL from
the target's distribution over the head's tokens, plus a small regression of the last hidden state, which gives every
position a dense signal (as EAGLE's feature loss does, arXiv 2401.15077). The schedule is a cosine over the time budget, so a run ends when
it was told to, on any machine.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from components.distillation.corpus import Conversation, batches, frequent_tokens


@dataclass(frozen=True)
class Recipe:
    """How to train. `minutes` counts this run's and all resumed runs' training time.

    `prompt_weight` is the weight of a position in a prompt against one in the target's own text: prompts come for free and
    hold back overfitting, but drafts are judged on the target's text.
    """

    layers: tuple[int, ...] = (0, 1, 28, 29)
    head_tokens: int = 8192
    minutes: float = 60.0
    batch_tokens: int = 2048
    peak_rate: float = 6e-4
    final_rate: float = 2e-5
    warmup_steps: int = 60
    weight_decay: float = 0.01
    hidden_weight: float = 0.3
    hard_weight: float = 0.3
    prompt_weight: float = 0.3
    seed: int = 0


def new_draft(target: Any, layers: Sequence[int]) -> Any:
    """A trainable float32 copy of a few of the target's layers, with the target's embeddings, frozen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in target.config.to_dict().items() if k not in ("_name_or_path", "_model_name_or_path", "architectures")}
    settings["num_hidden_layers"] = len(layers)
    settings.pop("layer_types", None)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    donor = target.state_dict()
    kept = {name: donor[name].float() for name in draft.state_dict() if ".layers." not in name}
    for new, old in enumerate(layers):
        prefix, source = f"model.layers.{new}.", f"model.layers.{old}."
        kept |= {name.replace(source, prefix, 1): t.float() for name, t in donor.items() if name.startswith(source)}
    draft.load_state_dict(kept)
    draft.get_input_embeddings().weight.requires_grad_(False)
    return draft


def grow(shallow: Any, target: Any, layers: Sequence[int], at: int) -> Any:
    """A deeper draft that starts out as a shallow, trained one: new layers add nothing until they are trained.

    Args:
        shallow: a draft of `new_draft`, trained.
        layers: the target's layers that are put in behind the first `at` layers of `shallow`; their two output projections
            start at zero, so that at first every new layer hands on what it is given.
    """
    old = shallow.config.num_hidden_layers
    deep = new_draft(target, [*range(at), *layers, *range(old - at)])  # the right shapes; the old layers are filled in below
    trained = shallow.state_dict()
    state = {name: t for name, t in trained.items() if ".layers." not in name}
    for i in [*range(at), *range(at, old)]:
        place = i if i < at else i + len(layers)
        source = f"model.layers.{i}."
        state |= {name.replace(source, f"model.layers.{place}.", 1): t for name, t in trained.items() if name.startswith(source)}
    deep.load_state_dict(state, strict=False)
    for layer in deep.model.layers[at : at + len(layers)]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return deep


def losses(draft: Any, group: Sequence[Conversation], head: Tensor, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
    """Loss of a batch.

    Args:
        head: `[head_tokens, hidden]` rows of the embedding.
    Returns:
        scalar loss and its parts; `agreement` is the share of output positions whose argmax equals the target's.
    """
    width = max(len(s.ids) for s in group)
    ids = torch.stack([F.pad(s.ids, (0, width - len(s.ids))) for s in group])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = draft.model(input_ids=ids, use_cache=False).last_hidden_state
        mine = torch.cat([states[i, 1 : len(s.ids) - 1] for i, s in enumerate(group)])
        wanted = torch.cat([s.hidden[1:] for s in group])
        written = torch.cat([torch.arange(1, len(s.ids) - 1) >= s.prompt - 1 for s in group])  # the target's own text
        logits, target = F.linear(mine, head).float(), F.linear(wanted, head).float()
    hidden = F.mse_loss(mine.float(), wanted.float()) / wanted.float().var()
    guess = logits.log_softmax(-1)
    weight = torch.where(written, 1.0, recipe.prompt_weight)
    weight = weight / weight.sum()
    soft = (F.kl_div(guess, target.log_softmax(-1), log_target=True, reduction="none").sum(-1) * weight).sum()
    labels = target.argmax(-1)  # the target's choice, which is the text itself where the target wrote it
    hard = (F.nll_loss(guess, labels, reduction="none") * weight).sum()
    agreement = (logits.argmax(-1) == labels)[written].float().mean()
    loss = soft + recipe.hard_weight * hard + recipe.hidden_weight * hidden
    return loss, {"kl": soft.item(), "hidden": hidden.item(), "agreement": agreement.item()}


def train(draft: Any, load: Callable[[], Sequence[Conversation]], embeddings: Tensor, recipe: Recipe, folder: Path, *,
          log: Callable[[str], None] = print) -> tuple[Tensor, dict[str, Any]]:
    """Train until the time budget is used; checkpoints every five minutes make it resumable.

    Args:
        load: reads the corpus; called before every pass, so that it may still grow.
        embeddings: `[vocab, hidden]`, tied with the head.
    Returns:
        the ids that the head covers, and steps, tokens, minutes and held-out agreement (2 % of the conversations).
    """
    rng = random.Random(recipe.seed)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.peak_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    progress = restore(draft, optimizer, folder)
    started, spent, saved, shown = time.monotonic(), progress["minutes"], time.monotonic(), []
    while progress["minutes"] < recipe.minutes:
        corpus = load()
        held, train_set = corpus[::50], [s for i, s in enumerate(corpus) if i % 50]
        head_ids, head = head_of(corpus, embeddings, recipe.head_tokens)
        log(f"a pass over {len(train_set)} conversations, {sum(len(s.ids) - s.prompt for s in train_set)} output tokens")
        for group in batches(train_set, recipe.batch_tokens, rng):
            share = progress["minutes"] / recipe.minutes
            rate = recipe.final_rate + (recipe.peak_rate - recipe.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
            for slot in optimizer.param_groups:
                slot["lr"] = rate * min(1.0, (progress["steps"] + 1) / recipe.warmup_steps)
            loss, parts = losses(draft, group, head, recipe)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            progress["steps"] += 1
            progress["tokens"] += sum(len(s.ids) for s in group)
            progress["minutes"] = spent + (time.monotonic() - started) / 60
            shown.append(parts)
            if progress["steps"] % 50 == 0:
                mean = {k: sum(p[k] for p in shown) / len(shown) for k in parts}
                done = f"step {progress['steps']:.0f}  {progress['minutes']:.1f} min  {progress['tokens'] / 1e6:.2f} M tokens"
                log(f"{done}  rate {rate:.1e}  " + "  ".join(f"{k} {v:.3f}" for k, v in mean.items()))
                shown = []
            if time.monotonic() - saved > 300:
                save(draft, optimizer, progress, folder)
                saved = time.monotonic()
                log(f"held-out agreement {held_out(draft, held, head, recipe):.3f}")
            if progress["minutes"] >= recipe.minutes:
                break
    save(draft, optimizer, progress, folder)
    return head_ids, {**progress, "held_out_agreement": held_out(draft, held, head, recipe), "recipe": asdict(recipe)}


def head_of(corpus: Sequence[Conversation], embeddings: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids that the head covers `[count]` and their rows `[count, hidden]` bfloat16."""
    ids = frequent_tokens(corpus, count, embeddings.shape[0])
    return ids, embeddings[ids].bfloat16()


@torch.no_grad()
def held_out(draft: Any, held: Sequence[Conversation], head: Tensor, recipe: Recipe) -> float:
    """Top-1 agreement on conversations that are not trained on, weighted by batch."""
    rng = random.Random(0)
    shares = [losses(draft, g, head, recipe)[1]["agreement"] for g in batches(held, recipe.batch_tokens, rng)]
    return sum(shares) / max(1, len(shares))


def save(draft: Any, optimizer: Any, progress: dict[str, float], folder: Path) -> None:
    """Write a checkpoint atomically: weights and both Adam moments in one safetensors file, progress in its metadata."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, p in draft.named_parameters():
        if p.requires_grad:
            tensors[name] = p.detach()
            for key in ("exp_avg", "exp_avg_sq", "step"):
                if key in optimizer.state.get(p, {}):
                    tensors[f"{name}#{key}"] = optimizer.state[p][key]
    partial = folder / "checkpoint.partial"
    save_file(tensors, partial, metadata={"progress": json.dumps(progress)})
    os.replace(partial, folder / "checkpoint.safetensors")


def restore(draft: Any, optimizer: Any, folder: Path) -> dict[str, float]:
    """Load the checkpoint of a folder, if there is one, and return the progress."""
    from safetensors import safe_open

    path = folder / "checkpoint.safetensors"
    if not path.is_file():
        return {"steps": 0, "tokens": 0, "minutes": 0.0}
    with safe_open(path, "pt") as f:
        names = set(f.keys())
        for name, p in draft.named_parameters():
            if name in names:
                p.data.copy_(f.get_tensor(name))
                optimizer.state[p] = {k: f.get_tensor(f"{name}#{k}") for k in ("exp_avg", "exp_avg_sq", "step") if f"{name}#{k}" in names}
        return dict(json.loads(f.metadata()["progress"]))
