"""Branches: what a model predicts after every prefix of a text, all prefixes at once.

A rollout asks, for every position of a text, which tokens the draft would write from there on. Step
j of all branches is one packed forward pass: each query reads the text's keys and values up to its
own position, which are in the slot already, and those of its own branch. A prefix is read once and
not once a branch; `SlowBranches` feeds each one separately and is the reference that
`TransformersBranches` must equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.transformers_model import ATTENTION, TransformersModel
from draftwell.serving.runtime.output import Model, Output

BRANCHES = "draftwell_branches"


class Branches(Protocol):
    """One branch after each of n prefixes of a text; tokens are fed to all of them in step."""

    def step(self, tokens: Sequence[int]) -> Output:
        """Feed branch i its next token `tokens[i]`; the model's prediction after it is position i
        of the output."""


def branches(
    model: Model, slot: int, ids: Sequence[int], starts: Sequence[int], depth: int
) -> Branches:
    """Branches after `ids[:start]` for each start.

    Args:
        slot: holds at least `ids[: max(starts)]`; nothing else is fed to it while the branches are
            in use.
        starts: prefix lengths, ascending, at least 1.
        depth: tokens that a branch can take.
    """
    if isinstance(model, TransformersModel):
        return TransformersBranches(model, slot, starts, depth)
    return SlowBranches(model, slot, ids, starts)


class SlowBranches:
    """The reference: every branch is fed to the slot by itself, after its prefix."""

    def __init__(self, model: Model, slot: int, ids: Sequence[int], starts: Sequence[int]):
        self.model, self.slot = model, slot
        self.ids, self.starts = list(ids), list(starts)
        self.fed: list[list[int]] = [[] for _ in starts]

    def step(self, tokens: Sequence[int]) -> Output:
        outputs = []
        for fed, start, token in zip(self.fed, self.starts, tokens, strict=True):
            fed.append(token)
            self.model.rollback(self.slot, 0)
            outputs += self.model.forward(
                [Forward("draft", self.slot, (*self.ids[:start], *fed), prefill=True)]
            )
        states = [output.hidden for output in outputs if output.hidden is not None]
        return Output(
            torch.cat([output.compact for output in outputs]),
            torch.cat(states) if states else None,
            outputs[0].support,
            outputs[0].vocab_size,
        )


@dataclass
class BranchStep:
    """What the attention function needs to know about a step.

    Args:
        slot: holds keys and values of the text.
        starts: `[n]`, how many of its positions each branch may read.
        keys, values: for each layer `[kv_heads, n, depth, head_dim]`, the branches' own.
        at: tokens fed to each branch before this step.
    """

    model: TransformersModel
    slot: int
    starts: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    at: int


class TransformersBranches:
    """Branches over the slot of a transformers model."""

    def __init__(self, model: TransformersModel, slot: int, starts: Sequence[int], depth: int):
        def own(memory: list[Tensor]) -> list[Tensor]:
            return [
                layer.new_zeros(layer.shape[1], len(starts), depth, layer.shape[3])
                for layer in memory
            ]

        self.model = model
        self.now = BranchStep(
            model,
            slot,
            torch.tensor(starts, device=model.device),
            own(model.slots.keys),
            own(model.slots.values),
            0,
        )

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Output:
        model, now = self.model, self.now
        ids, positions = torch.tensor(tokens, device=model.device), now.starts + now.at
        if isinstance(model, LeanLlama):
            states = model.run_layers(ids, positions, partial(lean_attention, now, model.shape))
        else:
            with _attention_of_branches(model.module):
                states = model.module.base_model(
                    input_ids=ids[None],
                    use_cache=False,
                    position_ids=positions[None],
                    draftwell_branches=now,
                ).last_hidden_state[0]
        now.at += 1
        return model.output(model.compact_logits(states), states)


@contextmanager
def _attention_of_branches(module: Any) -> Iterator[None]:
    """Let a module's layers attend as branches, and then over slots again."""
    from transformers import AttentionInterface

    AttentionInterface.register(BRANCHES, branch_attention)
    module.set_attn_implementation(BRANCHES)
    try:
        yield
    finally:
        module.set_attn_implementation(ATTENTION)


def branch_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one token of each branch over its prefix in the slot and over its own branch.

    Args:
        query: `[1, heads, n, head_dim]`; key, value: `[1, kv_heads, n, head_dim]`.
        options: as transformers passes them (`scaling`, `softcap`, `sliding_window`), with
            `draftwell_branches`, a `BranchStep`.
    Returns:
        `[1, n, heads, head_dim]`.
    """
    window = options.get("sliding_window") or getattr(module, "sliding_window", None)
    out = attend(
        options["draftwell_branches"],
        module.layer_idx,
        query[0],
        key[0],
        value[0],
        options.get("scaling"),
        options.get("softcap"),
        window,
    )
    return out[None], None


def lean_attention(
    now: BranchStep, shape: Architecture, layer: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """The same for the lean path: query `[n, heads, head_dim]`, key and value `[n, kv_heads,
    head_dim]` → `[n, heads * head_dim]`."""
    return attend(
        now,
        layer,
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        shape.scale,
        shape.attention_softcap,
        shape.windows[layer],
    ).flatten(1)


def attend(
    now: BranchStep,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Query `[heads, n, head_dim]`, key and value `[kv_heads, n, head_dim]` of one token of each
    branch → `[n, heads, head_dim]`."""
    length, end = int(now.starts.max()), now.at + 1
    now.keys[layer][:, :, now.at], now.values[layer][:, :, now.at] = key, value
    # [kv_heads, n, end, d]
    own_keys, own_values = now.keys[layer][:, :, :end], now.values[layer][:, :, :end]
    keys, values = (
        memory[layer][now.slot, :, :length]
        for memory in (now.model.slots.keys, now.model.slots.values)
    )
    kv_heads, n, _, dim = own_keys.shape
    groups = query.shape[0] // kv_heads
    q = query.reshape(kv_heads, groups, n, dim) * (scaling if scaling is not None else dim**-0.5)
    scores = torch.cat(
        [q @ keys[:, None].transpose(2, 3), torch.einsum("kgnd,kned->kgne", q, own_keys)], -1
    ).float()
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(now, length, window)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(q.dtype)
    out = weights[..., :length] @ values[:, None] + torch.einsum(
        "kgne,kned->kgnd", weights[..., length:], own_values
    )
    return out.reshape(kv_heads * groups, n, dim).transpose(0, 1)


def _visible(now: BranchStep, length: int, window: int | None) -> Tensor:
    """`[n, length + at + 1]` bool: the positions of text and own branch that each query may
    read."""
    device = now.starts.device
    own = torch.arange(now.at + 1, device=device)
    text = torch.arange(length, device=device)
    mine = torch.ones(len(now.starts), len(own), dtype=torch.bool, device=device)
    visible = torch.cat([text < now.starts[:, None], mine], 1)
    if window:
        position = now.starts[:, None] + now.at
        distance = torch.cat([position - text, position - (now.starts[:, None] + own)], 1)
        visible &= distance < window
    return visible
