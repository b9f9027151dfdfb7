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
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from draftwell.components.train.examples import LEAST_PROMPTS, TEST_SHARE
from draftwell.components.train.head_examples import target_texts
from draftwell.components.train.head_network import rate_at
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.medusa_heads import MedusaHeads
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.pair import LoadedPair

RATE, BATCH, DECAY, UNKNOWN = 1e-3, 64, 0.8, -100
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


class MedusaReport(BaseModel):
    """What `train_medusa_heads` found on prompts that it did not train on."""

    model_config = ConfigDict(extra="forbid")

    heads: int
    tokens: int = Field(description="that the heads may propose")
    epochs: int
    rows: dict[str, int] = Field(description="places of train and test")
    prompts: dict[str, list[str]] = Field(description="ids of train and test")
    left_out: list[str] = Field(description="test prompts that are in the training trace too")
    test_trace: str | None
    top1: list[float] = Field(
        description="share of places at which each head's likeliest token is right"
    )
    top3: list[float] = Field(description="the same of its three likeliest")


@dataclass
class ReadText:
    """A text of the target's.

    Args:
        states: `[n, hidden]` the target's normalised last states, each of which predicts a token of
            the output.
        output: `[n]` those tokens.
    """

    prompt: str
    key: tuple[int, ...]
    states: Tensor
    output: Tensor


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
        DraftwellError: a trace without the target's own texts (`no_target_texts`), too few prompts
            (`too_few_prompts`), or a target that returns no hidden states (`no_hidden_states`).
    """
    settings = settings or MedusaSettings()
    train, tested, left_out = split(
        read_target(pair, trace), None if test is None else read_target(pair, test), settings.seed
    )
    common = Counter(token for text in train for token in text.output.tolist()).most_common(
        settings.tokens
    )
    tokens = torch.tensor(sorted(token for token, _ in common))
    target: Any = pair.models["target"]
    # one that gradients may flow through
    embedding = target.head_rows(tokens).float().cpu().clone()
    states, labels = examples(train, tokens, settings.heads)
    weight, bias = fit(states, labels, embedding, settings)
    heads = MedusaHeads(weight, bias, tokens, provenance)
    unseen, wanted = examples(tested, tokens, settings.heads)
    top1, top3 = (accuracy(heads, unseen, wanted, embedding, most) for most in (1, 3))
    test_trace = None if test is None else test.digest()
    recipe = {"heads": settings.heads, "tokens": len(tokens), "epochs": settings.epochs}
    report = MedusaReport(
        **recipe,
        rows={"train": len(states), "test": len(unseen)},
        left_out=left_out,
        test_trace=test_trace,
        prompts={
            "train": sorted({text.prompt for text in train}),
            "test": sorted({text.prompt for text in tested}),
        },
        top1=top1,
        top3=top3,
    )
    metrics = {
        f"{name}_{k}": value
        for name, found in (("top1", top1), ("top3", top3))
        for k, value in enumerate(found, start=1)
    }
    heads.provenance = provenance.model_copy(
        update={
            "parameters": {
                **provenance.parameters,
                **recipe,
                "seed": settings.seed,
                "test_trace": test_trace,
            },
            "metrics": {**provenance.metrics, **metrics},
        }
    )
    return heads, report


def read_target(pair: LoadedPair, trace: TraceSet) -> list[ReadText]:
    """The target's states over each text that it wrote."""
    found, model = [], pair.models["target"]
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
                (
                    f"the target of pair {pair.name} returns no hidden states, which Medusa's "
                    "heads read: choose another pair"
                ),
                code="no_hidden_states",
            )
        found.append(
            ReadText(
                rows.column("prompt_id")[0].as_py(),
                tuple(prompt),
                read.hidden.cpu().clone(),
                torch.tensor(output),
            )
        )
    if not found:
        raise DraftwellError(
            f"{trace.folder} holds no text written by the target: collect some with "
            "`draftwell collect --kinds target --fresh`",
            code="no_target_texts",
        )
    return found


def split(
    texts: list[ReadText], test: list[ReadText] | None, seed: int
) -> tuple[list[ReadText], list[ReadText], list[str]]:
    """Texts to train on, texts to test on, without a common prompt, and the ids of the test prompts
    that were left out for that."""
    if test is not None:
        known = {text.key for text in texts}
        unseen = [text for text in test if text.key not in known]
        if not unseen:
            raise DraftwellError(
                (
                    "every prompt of the test trace is in the training trace too: collect a "
                    "test trace of other prompts"
                ),
                code="too_few_prompts",
            )
        return texts, unseen, sorted({text.prompt for text in test if text.key in known})
    keys = sorted({text.key for text in texts})
    if len(keys) < LEAST_PROMPTS:
        raise DraftwellError(
            (
                f"{len(keys)} prompts are too few to train and to test on: collect at least "
                f"{LEAST_PROMPTS}"
            ),
            code="too_few_prompts",
        )
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed)).tolist()
    held = {keys[i] for i in order[: max(1, round(TEST_SHARE * len(keys)))]}
    return (
        [text for text in texts if text.key not in held],
        [text for text in texts if text.key in held],
        [],
    )


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


def fit(
    states: Tensor, labels: Tensor, embedding: Tensor, settings: MedusaSettings
) -> tuple[Tensor, Tensor]:
    """Weights `[K, hidden, hidden]` and biases `[K, hidden]`; the same examples and settings give
    the same ones.

    Args:
        embedding: `[tokens, hidden]` float32.
    """
    known = (labels != UNKNOWN).any(1)
    states, labels = states[known], labels[known]
    weight = torch.zeros(settings.heads, states.shape[1], states.shape[1], requires_grad=True)
    bias = torch.zeros(settings.heads, states.shape[1], requires_grad=True)
    optimiser = torch.optim.AdamW([weight, bias], lr=RATE, weight_decay=0.0)
    steps = settings.epochs * math.ceil(len(states) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_at(step, steps))
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(states), generator=generator).split(BATCH):
            h = states[rows].float()
            optimiser.zero_grad()
            losses = [
                DECAY ** (k + 1)
                * cross_entropy(
                    (h + silu(h @ weight[k].T + bias[k])) @ embedding.T,
                    labels[rows, k],
                    ignore_index=UNKNOWN,
                    reduction="sum",
                )
                / max(1, int((labels[rows, k] >= 0).sum()))
                for k in range(settings.heads)
            ]
            torch.stack(losses).sum().backward()
            optimiser.step()
            schedule.step()
    return weight.detach(), bias.detach()


@torch.no_grad()
def accuracy(
    heads: MedusaHeads, states: Tensor, labels: Tensor, embedding: Tensor, most: int
) -> list[float]:
    """Of each head the share of places that have a label whose label is among its `most` likeliest
    tokens; 0 without any."""
    right, places = torch.zeros(len(heads)), (labels != UNKNOWN).sum(0)
    for at in range(0, len(states), BATCH):
        h = states[at : at + BATCH].float()
        for k in range(len(heads)):
            best = (
                ((h + silu(h @ heads.weight[k].T + heads.bias[k])) @ embedding.T)
                .topk(min(most, len(embedding)))
                .indices
            )
            right[k] += (best == labels[at : at + BATCH, k, None]).any(1).sum()
    found: list[float] = (right / places.clamp(min=1)).tolist()
    return found
