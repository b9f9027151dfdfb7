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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

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
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.pair import LoadedPair

BATCH, DECAY, UNKNOWN = 64, 0.8, -100
COLUMNS = ("prompt_id", "kind", "position", "prompt_tokens", "token")


class MedusaSettings(BaseModel):
    """How Medusa's heads are trained."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    heads: int = Field(3, ge=1, le=8, description="K: tokens that are predicted after the next one")
    tokens: int = Field(
        8192,
        ge=1,
        description=(
            "tokens that the heads may propose: those that the training texts hold most often"
        ),
    )
    epochs: int = Field(4, ge=1, description="passes over the training texts")
    seed: int = Field(0, description="of the split by prompt and of the order of examples")


class MedusaReport(TrainingReport):
    """What `train_medusa_heads` found on prompts that it did not train on; rows are places."""

    heads: int
    tokens: int = Field(description="that the heads may propose")
    epochs: int
    top1: list[float] = Field(
        description="share of places at which each head's likeliest token is right"
    )
    top3: list[float] = Field(description="the same of its three likeliest")


@dataclass
class ReadText:
    """A text of the target's.

    Args:
        prompt: id of the first prompt with the same tokens.
        states: `[n, hidden]` the target's normalised last states, each of which predicts a token of
            the output.
        output: `[n]` those tokens.
    """

    prompt: str
    states: Tensor
    output: Tensor


@dataclass
class TargetTexts:
    """Texts of the target's, which are split by prompt."""

    texts: Sequence[ReadText]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def prompt(self) -> np.ndarray:
        """`[texts]` ids of their prompts."""
        return np.array([text.prompt for text in self.texts])

    def take(self, rows: np.ndarray) -> TargetTexts:
        """The texts of a boolean array."""
        return TargetTexts([self.texts[i] for i in np.flatnonzero(rows).tolist()])


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
    settings: MedusaSettings | None = None,
    *,
    test: TraceSet | None = None,
) -> tuple[MedusaHeads, MedusaReport]:
    """Train on most prompts and test on the others, a fifth of them.

    Args:
        pair: its target reads the texts.
        provenance: of the heads; parameters and metrics are filled in.
        test: a trace of test prompts, without those that `trace` has too; then all of `trace` is
            trained on.
    Raises:
        DraftwellError: a trace without the target's own texts (`no_target_texts`), a target that
            returns no hidden states (`no_hidden_states`), or as in `read_train_and_test`.
    """
    settings = settings or MedusaSettings()
    train, tested, left_out = read_train_and_test(
        trace, test, settings.seed, partial(read_target, pair)
    )
    common = Counter(token for text in train.texts for token in text.output.tolist()).most_common(
        settings.tokens
    )
    tokens = torch.tensor(sorted(token for token, _ in common))
    target: Any = pair.models["target"]
    # one that gradients may flow through
    embedding = target.head_rows(tokens).float().cpu().clone()
    states, labels = examples(train.texts, tokens, settings.heads)
    blocks = train_blocks(states, labels, embedding, settings)
    heads = MedusaHeads(blocks.weight.detach(), blocks.bias.detach(), tokens, provenance)
    unseen, wanted = examples(tested.texts, tokens, settings.heads)
    top1, top3 = (accuracy(blocks, unseen, wanted, embedding, most) for most in (1, 3))
    recipe = {"heads": settings.heads, "tokens": len(tokens), "epochs": settings.epochs}
    split = describe_split(train, tested, left_out, test)
    split["rows"] = {"train": len(states), "test": len(unseen)}
    report = MedusaReport(**recipe, **split, top1=top1, top3=top3)
    metrics = {
        f"{name}_{k}": value
        for name, found in (("top1", top1), ("top3", top3))
        for k, value in enumerate(found, start=1)
    }
    heads.provenance = provenance.extended(
        {**recipe, "seed": settings.seed, "test_trace": report.test_trace}, metrics
    )
    return heads, report


def read_target(pair: LoadedPair, trace: TraceSet) -> TargetTexts:
    """The target's states over each text that it wrote."""
    texts, model, same = [], pair.models["target"], first_of_the_same(trace)
    for rows in target_texts(trace.read(COLUMNS)):
        prompt, output = rows.column("prompt_tokens")[0].as_py(), rows.column("token").to_pylist()
        slot = model.open()
        try:
            read = model.forward(
                [Forward("target", slot, (*prompt, *output[:-1]), keep=len(output), prefill=True)]
            )[0]
        finally:
            model.close(slot)
        if read.hidden is None:
            raise DraftwellError(
                f"the target of pair {pair.name} returns no hidden states, which Medusa's "
                "heads read: choose another pair",
                code="no_hidden_states",
            )
        name = rows.column("prompt_id")[0].as_py()
        texts.append(
            ReadText(same.get(name, name), read.hidden.cpu().clone(), torch.tensor(output))
        )
    if not texts:
        raise DraftwellError(
            f"{trace.folder} holds no text written by the target: collect some with "
            "`draftwell collect --kinds target --fresh`",
            code="no_target_texts",
        )
    return TargetTexts(texts)


def examples(texts: Sequence[ReadText], tokens: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """States `[n, hidden]` and, of each head, the place in `tokens` of the token that it shall
    predict, `[n, heads]`: `UNKNOWN` where there is none, after the text's end or because it is not
    among them."""
    columns = []
    for text in texts:
        place = torch.searchsorted(tokens, text.output).clamp(max=len(tokens) - 1)
        place[tokens[place] != text.output] = UNKNOWN
        ahead = torch.full((len(place), heads), UNKNOWN)
        for k in range(1, min(heads, len(place) - 1) + 1):
            ahead[: len(place) - k, k - 1] = place[k:]
        columns.append(ahead)
    return torch.cat([text.states for text in texts]), torch.cat(columns)


def train_blocks(
    states: Tensor, labels: Tensor, embedding: Tensor, settings: MedusaSettings
) -> Blocks:
    """The blocks, trained; the same examples and settings give the same ones.

    Args:
        embedding: `[tokens, hidden]` float32.
    """
    known = (labels != UNKNOWN).any(1)
    states, labels = states[known], labels[known]
    blocks = Blocks(settings.heads, states.shape[1])

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

    budget = passes_budget(settings.epochs, math.ceil(len(states) / BATCH))
    fit(blocks, loss, budget, shuffled_rows(len(states), BATCH, settings.seed))
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
