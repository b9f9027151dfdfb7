"""The target's own text as training data: written in shards, read back in batches.

A shard is one safetensors file: `ids` (all sequences, one after another), `prompt` and `total`
(lengths) and `hidden`, the states of some layers, then the target's normalised last ones. The head
recomputes the target's logits from these, so that training needs neither the target nor its
vocabulary-wide logits on disk. A shard's name is a digest of its inputs: finished shards are found
again, and none of other prompts, settings or another target can slip in.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftwell.components.distil.writers import Writer
from draftwell.components.train.checkpoint import Checkpoint
from draftwell.components.train.fit import Budget, Passes
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import put_file

HELD_OUT = 50
"""Conversations of every prompt with such a number are measured on, not learned from."""


WIDTHS = 32
"""Batches have a multiple of this many tokens in a row: a processor's library makes new kernels for
every new shape of a product, which takes longer than the product itself."""


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Args:
        ids: `[total]` tokens, of which the first `prompt` were given.
        states: what rows are read from at every use, such as a shard's slice `hidden`, an object of
            safetensors: the states of several layers of millions of tokens take tens of gigabytes.
        row: the first one.
    """

    ids: Tensor
    prompt: int
    states: Any
    row: int = 0

    @property
    def hidden(self) -> Tensor:
        """`[total - 1, width]` states, as stored."""
        found: Tensor = self.states[self.row : self.row + len(self.ids) - 1]
        return found


def write_corpus(
    writer: Writer,
    prompts: Sequence[list[int]],
    folder: Path,
    *,
    donor: str,
    new_tokens: int = 128,
    batch: int = 128,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Write the target's greedy continuations of `prompts`, shard by shard, and return the shards
    in order. Finished shards are kept on a rerun.

    Args:
        donor: sha256 of the target's weights.
        batch: prompts of a shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = [list(prompts[at : at + batch]) for at in range(0, len(prompts), batch)]
    paths = []
    for number, rows in enumerate(shards, 1):
        made_of = json.dumps([donor, writer.identity, new_tokens, rows])
        path = folder / f"shard-{hashlib.sha256(made_of.encode()).hexdigest()[:24]}.safetensors"
        if not path.exists():
            results = writer.greedy(rows, new_tokens)
            save_shard(
                path,
                [(p, out) for p, (out, _) in zip(rows, results, strict=True)],
                [hidden for _, hidden in results],
            )
            say(
                f"shard {number} of {len(shards)}: {sum(len(out) for out, _ in results)} "
                "tokens by the target"
            )
        paths.append(path)
    return paths


def save_shard(
    path: Path, rows: Sequence[tuple[list[int], list[int]]], states: Sequence[Tensor]
) -> None:
    """Write a shard of (prompt, output) rows and their states, all or nothing."""
    shard = {
        "ids": torch.tensor([t for p, out in rows for t in p + out], dtype=torch.int32),
        "prompt": torch.tensor([len(p) for p, _ in rows]),
        "total": torch.tensor([len(p) + len(out) for p, out in rows]),
        "hidden": torch.cat(list(states)),
    }
    put_file(path, lambda file: save_file(shard, file))


def read_corpus(shards: Iterable[Path]) -> list[Conversation]:
    """All conversations of these shards, in order.

    Raises:
        DraftwellError: a shard is damaged.
    """
    return [conversation for path in shards for conversation in _conversations(path)]


def _conversations(path: Path) -> Iterator[Conversation]:
    """Those of one shard, whose tensors are checked to have matching lengths."""
    try:
        file = safe_open(path, "pt")
        ids, prompts, totals = (file.get_tensor(name) for name in ("ids", "prompt", "total"))
        states = file.get_slice("hidden")
        sound = [len(prompts), len(ids), states.get_shape()[0]] == [
            len(totals),
            int(totals.sum()),
            int((totals - 1).sum()),
        ]
    except (OSError, ValueError, KeyError, SafetensorError):
        sound = False
    if not sound:
        raise DraftwellError(
            f"{path} is damaged: delete it and run the same command again, which writes it again",
            code="damaged_shard",
        )
    at = row = 0
    for prompt, total in zip(prompts.tolist(), totals.tolist(), strict=True):
        yield Conversation(ids[at : at + total].long(), prompt, states, row)
        at, row = at + total, row + total - 1


def corpus_digest(sequences: Sequence[Conversation]) -> str:
    """sha256 over all token ids and prompt lengths, in order."""
    digest = hashlib.sha256()
    for s in sequences:
        digest.update(f"{s.prompt},{len(s.ids)};".encode())
        digest.update(s.ids.to(torch.int32).numpy().tobytes())
    return digest.hexdigest()


def checkpoint_on(
    corpus: Sequence[Conversation], folder: Path, recipe: Budget, head_ids: Tensor, donor: str
) -> Checkpoint:
    """The checkpoint of a training on this text.

    Args:
        head_ids: tokens that are covered.
        donor: sha256 of the target's weights.
    """
    covered = hashlib.sha256(head_ids.to(torch.int32).cpu().numpy().tobytes()).hexdigest()
    text = corpus_digest(corpus)
    return Checkpoint(
        folder, {**recipe.identity(), "target": donor, "head": covered, "corpus": text}
    )


def hold_out(
    sequences: Sequence[Conversation],
) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to measure on, those of every fiftieth prompt, and the others; a prompt that is
    repeated is on one side only.

    Raises:
        DraftwellError: no others are left.
    """
    prompts: dict[bytes, int] = {}
    places = [
        prompts.setdefault(s.ids[: s.prompt].to(torch.int32).numpy().tobytes(), len(prompts))
        for s in sequences
    ]
    held = [s for s, place in zip(sequences, places, strict=True) if place % HELD_OUT == 0]
    others = [s for s, place in zip(sequences, places, strict=True) if place % HELD_OUT]
    if not others:
        raise DraftwellError(
            "the target wrote fewer than two texts to learn from: give more prompts",
            code="too_little_text",
        )
    return held, others


def passes_over(
    sequences: Sequence[Conversation], tokens: int, seed: int
) -> Passes[Sequence[Conversation]]:
    """Batches of about `tokens` tokens, in another order in every pass."""
    return Passes(
        lambda number: list(batches(sequences, tokens, random.Random(f"{seed}/{number}"))),
        lambda group: sum(len(s.ids) for s in group),
    )


def frequent_tokens(sequences: Sequence[Conversation], count: int, vocab: int) -> Tensor:
    """The `count` ids that the target emits most, ascending; ties go to the ids seen most in
    prompts, then the lowest."""
    emitted = torch.zeros(vocab, dtype=torch.double)
    for s in sequences:
        emitted += torch.bincount(s.ids[s.prompt :], minlength=vocab)
        emitted += 1e-4 * torch.bincount(s.ids[: s.prompt], minlength=vocab)
    return emitted.argsort(descending=True, stable=True)[:count].sort().values


def padded(rows: Sequence[Tensor], beyond: int = 0, most: int | None = None) -> Tensor:
    """Rows `[length, …]` as one tensor `[rows, width, …]`, with zeros behind the shorter ones.

    Args:
        beyond: the width is a multiple of `WIDTHS` plus this.
        most: width that padding alone must not exceed, as a model has no more positions.
    """
    longest = max(len(row) for row in rows)
    width = rounded_up(longest - beyond) + beyond
    width = width if most is None else max(longest, min(width, most))
    together = rows[0].new_zeros(len(rows), width, *rows[0].shape[1:])
    for place, row in zip(together, rows, strict=True):
        place[: len(row)] = row
    return together


def rounded_up(count: int) -> int:
    """A count as the next multiple of `WIDTHS`."""
    return -(-count // WIDTHS) * WIDTHS


def batches(
    sequences: Sequence[Conversation], tokens: int, rng: random.Random
) -> Iterator[list[Conversation]]:
    """One pass in random order: batches of about `tokens` tokens, similar lengths together to save
    padding."""
    order = sorted(
        rng.sample(range(len(sequences)), len(sequences)),
        key=lambda i: len(sequences[i].ids) + rng.random() * 40,
    )
    groups: list[list[Conversation]] = [[]]
    for i in order:
        width = max([len(sequences[i].ids), *(len(s.ids) for s in groups[-1])])
        if groups[-1] and rounded_up(width) * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(sequences[i])
    rng.shuffle(groups)
    yield from groups
