"""The target's own text as training data: generated in shards, read back in batches.

A shard is one safetensors file: `ids` (all sequences, one behind the other), `prompt` and `total` (lengths) and `hidden`,
the target's normalised last states. With tied embeddings `hidden @ head.T` gives the target's logits again, so that
training needs neither the target nor its vocabulary-wide logits on disk.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from components.distillation.lean import LeanLlama, generate_batch


@dataclass
class Conversation:
    """One conversation: `ids` `[total]`, of which the first `prompt` were given, and `hidden` `[total − 1, hidden]`."""

    ids: Tensor
    prompt: int
    hidden: Tensor


def generate_corpus(model: LeanLlama, prompts: Sequence[list[int]], folder: Path, *, new_tokens: int = 160, eos: int,
                    batch: int = 128, chunk: int = 10, log: Callable[[str], None] = print) -> None:
    """Write the target's greedy continuations of `prompts`, shard by shard; finished shards are kept on a rerun.

    Batches hold prompts of similar length, sorted within chunks of `chunk` batches, so that any number of finished
    shards is already a mixed corpus.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = batch * chunk
    for start in range(0, len(prompts), size):
        ordered = sorted(prompts[start : start + size], key=len)
        for at in range(0, len(ordered), batch):
            path = folder / f"shard-{start:06d}-{at:05d}.safetensors"
            if path.exists():
                continue
            rows = ordered[at : at + batch]
            results = generate_batch(model, rows, new_tokens, eos)
            save_shard(path, [(p, out) for p, (out, _) in zip(rows, results, strict=True)], [hidden for _, hidden in results])
            log(f"{path.name}: {sum(len(out) for out, _ in results)} tokens")


def save_shard(path: Path, rows: Sequence[tuple[list[int], list[int]]], states: Sequence[Tensor]) -> None:
    """Write a shard of (prompt, output) rows and their states, all or nothing."""
    from safetensors.torch import save_file

    shard = {
        "ids": torch.tensor([t for p, out in rows for t in p + out], dtype=torch.int32),
        "prompt": torch.tensor([len(p) for p, _ in rows]),
        "total": torch.tensor([len(p) + len(out) for p, out in rows]),
        "hidden": torch.cat(list(states)),
    }
    partial = path.with_suffix(".partial")
    save_file(shard, partial)
    os.replace(partial, path)


def read_corpus(folder: Path) -> list[Conversation]:
    """All sequences of all shards, in order."""
    from safetensors.torch import load_file

    sequences = []
    for path in sorted(folder.glob("shard-*.safetensors")):
        shard = load_file(path)
        at = states = 0
        for prompt, total in zip(shard["prompt"].tolist(), shard["total"].tolist(), strict=True):
            sequences.append(Conversation(shard["ids"][at : at + total].long(), prompt, shard["hidden"][states : states + total - 1]))
            at, states = at + total, states + total - 1
    return sequences


def corpus_digest(sequences: Sequence[Conversation]) -> str:
    """sha256 over all token ids and prompt lengths, in order."""
    digest = hashlib.sha256()
    for s in sequences:
        digest.update(f"{s.prompt},{len(s.ids)};".encode())
        digest.update(s.ids.to(torch.int32).numpy().tobytes())
    return digest.hexdigest()


def frequent_tokens(sequences: Sequence[Conversation], count: int, vocab: int) -> Tensor:
    """The `count` ids that the target emits most, ascending; ties go to the ids seen most in prompts, then the lowest."""
    emitted = torch.zeros(vocab, dtype=torch.double)
    for s in sequences:
        emitted += torch.bincount(s.ids[s.prompt :], minlength=vocab)
        emitted += 1e-4 * torch.bincount(s.ids[: s.prompt], minlength=vocab)
    return emitted.argsort(descending=True, stable=True)[:count].sort().values


def batches(sequences: Sequence[Conversation], tokens: int, rng: random.Random) -> Iterator[list[Conversation]]:
    """One pass in random order: batches of about `tokens` tokens, similar lengths together to save padding."""
    order = sorted(rng.sample(range(len(sequences)), len(sequences)), key=lambda i: len(sequences[i].ids) + rng.random() * 40)
    groups: list[list[Conversation]] = [[]]
    for i in order:
        width = max([len(sequences[i].ids), *(len(s.ids) for s in groups[-1])])
        if groups[-1] and width * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(sequences[i])
    rng.shuffle(groups)
    yield from groups
