"""Training Medusa's heads on the target's own texts (Cai 2024, 2401.10774, section 2.2.1,
"Medusa-1": the target stays as it is).

The target reads each text that it wrote; its last hidden state at a place predicts the next token
through its own head, and head k shall predict the token k places further. Loss: Σ_k λ^k ·
cross-entropy, λ = .8. The blocks begin at 0, so that every head begins as the target's own. Ours:
the output embedding is the target's and stays as it is, of the tokens that the texts hold most
often; other tokens are no labels.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from draftwell.components.collect.decoding import read_text
from draftwell.components.collect.repeated_prompts import first_of_the_same
from draftwell.components.train.examples import read_train_and_test
from draftwell.components.train.fit import fit, shuffled_rows
from draftwell.components.train.head_examples import target_texts
from draftwell.components.train.head_network import passes_budget
from draftwell.components.train.reports import TrainingReport, describe_split
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.medusa_heads import MedusaHeads
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair

BATCH, DECAY, UNKNOWN = 64, 0.8, -100
HEADS = 3
"""K: tokens that are predicted after the next one."""
TOKENS = 8192
"""Tokens that the heads may propose, those that the training texts hold most often: nearly all of
a text, for a fraction of an output embedding's time."""
EPOCHS = 4
"""Passes over the training texts."""
COLUMNS = ("prompt_id", "kind", "position", "prompt_tokens", "token")


class MedusaReport(TrainingReport):
    """What `train_medusa_heads` found on prompts that it did not train on; rows are places."""

    heads: int
    tokens: int = Field(description="that the heads may propose")
    epochs: int
    top1: list[float] = Field(
        description="share of places at which each head's likeliest token is right"
    )
    top3: list[float] = Field(description="the same of its three likeliest")


@dataclass(frozen=True)
class Places:
    """Places in texts of the target's.

    Args:
        prompt: `[n]` ids of their prompts; of several with the same tokens, the first one's.
        states: `[n, hidden]` the target's normalised last states.
        ahead: `[n, heads + 1]` the token that the target itself predicts there, and those that the
            heads shall; `UNKNOWN` after the text's end.
    """

    prompt: np.ndarray
    states: Tensor
    ahead: Tensor

    def __len__(self) -> int:
        return len(self.prompt)

    def take(self, rows: np.ndarray) -> Places:
        """The places of a boolean array."""
        kept = torch.from_numpy(rows)
        return Places(self.prompt[rows], self.states[kept], self.ahead[kept])


class Blocks(nn.Module):
    """What the heads learn: of each a layer whose output is added to the state, 0 at first."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, width, width))
        self.bias = nn.Parameter(torch.zeros(heads, width))

    def forward(self, h: Tensor) -> Tensor:
        """`[n, hidden]` → `[heads, n, hidden]`."""
        return h + silu(h @ self.weight.transpose(1, 2) + self.bias[:, None])


def train_medusa_heads(
    pair: LoadedPair,
    trace: TraceSet,
    provenance: Provenance,
    *,
    test: TraceSet | None = None,
    epochs: int = EPOCHS,
    seed: int = 0,
) -> tuple[MedusaHeads, MedusaReport]:
    """Train on most prompts and test on the others, a fifth of them.

    Args:
        pair: its target reads the texts.
        provenance: of the heads; parameters and metrics are filled in.
        test: a trace of test prompts, without those that `trace` has too; then all of `trace` is
            trained on.
        epochs: passes over the training texts.
        seed: of the split by prompt and of the order of examples.
    Raises:
        DraftwellError: a trace without the target's own texts (`no_target_texts`), a target that
            returns no hidden states (`no_hidden_states`), or as in `read_train_and_test`.
    """
    read = partial(read_target, pair, HEADS)
    train, tested, left_out = read_train_and_test(trace, test, seed, read)
    common = Counter(train.ahead[:, 0].tolist()).most_common(TOKENS)
    tokens = torch.tensor(sorted(token for token, _ in common))
    target: Any = pair.models["target"]
    # one that gradients may flow through
    embedding = target.head_rows(tokens).float().cpu().clone()
    blocks = train_blocks(train.states, labels_of(train, tokens), embedding, epochs, seed)
    heads = MedusaHeads(blocks.weight.detach(), blocks.bias.detach(), tokens, provenance)
    wanted = labels_of(tested, tokens)
    top1, top3 = (accuracy(blocks, tested.states, wanted, embedding, most) for most in (1, 3))
    recipe = {"heads": HEADS, "tokens": len(tokens), "epochs": epochs}
    split = describe_split(train, tested, left_out, test)
    report = MedusaReport(**recipe, **split, top1=top1, top3=top3)
    metrics = {
        f"{name}_{k}": value
        for name, found in (("top1", top1), ("top3", top3))
        for k, value in enumerate(found, start=1)
    }
    heads.provenance = provenance.extended(
        {**recipe, "seed": seed, "test_trace": report.test_trace}, metrics
    )
    return heads, report


def read_target(pair: LoadedPair, heads: int, trace: TraceSet) -> Places:
    """The target's states over each text that it wrote, and the tokens ahead of them."""
    prompts, states, ahead = list[str](), list[Tensor](), list[Tensor]()
    model, same = pair.models["target"], first_of_the_same(trace)
    for rows in target_texts(trace.read(COLUMNS)):
        prompt, output = rows.column("prompt_tokens")[0].as_py(), rows.column("token").to_pylist()
        read = read_text(model, "target", (*prompt, *output[:-1]), len(output))
        if read.states is None:
            raise DraftwellError(
                f"the target of pair {pair.name} returns no hidden states, which Medusa's "
                "heads read: choose another pair",
                code="no_hidden_states",
            )
        name = rows.column("prompt_id")[0].as_py()
        prompts += [same.get(name, name)] * len(output)
        states.append(read.states.cpu().clone())
        padded = torch.tensor([*output, *[UNKNOWN] * heads])
        ahead.append(padded.unfold(0, heads + 1, 1))
    return Places(np.array(prompts), torch.cat(states), torch.cat(ahead))


def labels_of(places: Places, tokens: Tensor) -> Tensor:
    """`[n, heads]` for each head the place in `tokens` of the token that it shall predict;
    `UNKNOWN` where there is none, or it is not among them."""
    ahead = places.ahead[:, 1:].contiguous()
    place = torch.searchsorted(tokens, ahead).clamp(max=len(tokens) - 1)
    return torch.where(tokens[place] == ahead, place, UNKNOWN)


def train_blocks(
    states: Tensor, labels: Tensor, embedding: Tensor, epochs: int, seed: int
) -> Blocks:
    """The blocks, trained; the same examples, passes and seed give the same ones.

    Args:
        embedding: `[tokens, hidden]` float32.
    """
    known = (labels != UNKNOWN).any(1)
    states, labels = states[known], labels[known]
    blocks = Blocks(HEADS, states.shape[1])

    def loss(rows: Tensor, _: int) -> tuple[Tensor, dict[str, float]]:
        losses = [
            DECAY ** (k + 1)
            * cross_entropy(said @ embedding.T, wanted, ignore_index=UNKNOWN, reduction="sum")
            / max(1, int((wanted >= 0).sum()))
            for k, (said, wanted) in enumerate(
                zip(blocks(states[rows].float()), labels[rows].T, strict=True)
            )
        ]
        return torch.stack(losses).sum(), {}

    budget = passes_budget(epochs, math.ceil(len(states) / BATCH))
    fit(blocks, loss, budget, shuffled_rows(len(states), BATCH, seed))
    return blocks


@torch.no_grad()
def accuracy(
    blocks: Blocks, states: Tensor, labels: Tensor, embedding: Tensor, most: int
) -> list[float]:
    """Of each head the share of places that have a label whose label is among its `most` likeliest
    tokens; 0 without any."""
    right, places = torch.zeros(labels.shape[1]), (labels != UNKNOWN).sum(0)
    for h, wanted in zip(states.split(BATCH), labels.split(BATCH), strict=True):
        logits = blocks(h.float()) @ embedding.T  # [heads, n, tokens]
        best = logits.topk(min(most, len(embedding))).indices
        right += (best == wanted.T[..., None]).any(-1).sum(1)
    found: list[float] = (right / places.clamp(min=1)).tolist()
    return found
