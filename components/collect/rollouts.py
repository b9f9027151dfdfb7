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
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.transformers_model import ATTENTION, TransformersModel

BRANCHES = "draftwell_branches"


class Branches(Protocol):
    """One branch after each of n prefixes of a text; tokens are fed to all of them in step."""

    def step(self, tokens: Sequence[int]) -> Span:
        """Feed branch i its next token `tokens[i]`; row i is the model's prediction after it."""


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

    def step(self, tokens: Sequence[int]) -> Span:
        spans = []
        for fed, start, token in zip(self.fed, self.starts, tokens, strict=True):
            fed.append(token)
            self.model.rollback(self.slot, 0)
            spans += self.model.forward(
                [Forward("draft", self.slot, (*self.ids[:start], *fed), prefill=True)]
            )
        return Span.joined(spans)


class TransformersBranches:
    """Branches over the slot of a transformers model.

    Their own keys and values are `[kv_heads, n, depth, head_dim]` for each layer.
    """

    def __init__(self, model: TransformersModel, slot: int, starts: Sequence[int], depth: int):
        self.model, self.slot, self.fed = model, slot, 0
        # [n]: how many of the slot's positions each branch may read
        self.starts = torch.tensor(starts, device=model.device)
        self.keys, self.values = (
            [
                layer.new_zeros(layer.shape[1], len(starts), depth, layer.shape[3])
                for layer in memory
            ]
            for memory in (model.slots.keys, model.slots.values)
        )

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Span:
        model = self.model
        ids, positions = torch.tensor(tokens, device=model.device), self.starts + self.fed
        if isinstance(model, LeanLlama):
            states = model.run_layers(ids, positions, partial(self.lean_attention, model.shape))
        else:
            with attending_as_branches(model.module):
                states = model.module.base_model(
                    input_ids=ids[None],
                    use_cache=False,
                    position_ids=positions[None],
                    draftwell_branches=self,
                ).last_hidden_state[0]
        self.fed += 1
        return Span.of(model.logits_of(states))

    def lean_attention(
        self, shape: Architecture, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """As `attend` for the lean path, whose tensors are `[n, heads, head_dim]` → `[n, heads *
        head_dim]`."""
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        limits = (shape.scale, shape.attention_softcap, shape.windows[layer])
        return self.attend(layer, query, key, value, *limits).flatten(1)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        """Attention of one token of each branch over its prefix in the slot and over its own
        branch.

        Args:
            query: `[heads, n, head_dim]`; key, value: `[kv_heads, n, head_dim]`.
        Returns:
            `[n, heads, head_dim]`.
        """
        length, end = int(self.starts.max()), self.fed + 1
        self.keys[layer][:, :, self.fed], self.values[layer][:, :, self.fed] = key, value
        # [kv_heads, n, end, d]
        own_keys, own_values = self.keys[layer][:, :, :end], self.values[layer][:, :, :end]
        keys, values = (
            memory[layer][self.slot, :, :length]
            for memory in (self.model.slots.keys, self.model.slots.values)
        )
        kv_heads, n, _, dim = own_keys.shape
        groups = query.shape[0] // kv_heads
        q = query.reshape(kv_heads, groups, n, dim)
        q = q * (scaling if scaling is not None else dim**-0.5)
        scores = torch.cat(
            [q @ keys[:, None].transpose(2, 3), torch.einsum("kgnd,kned->kgne", q, own_keys)], -1
        ).float()
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = ~self.visible(length, window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype)
        out = weights[..., :length] @ values[:, None] + torch.einsum(
            "kgne,kned->kgnd", weights[..., length:], own_values
        )
        return out.reshape(kv_heads * groups, n, dim).transpose(0, 1)

    def visible(self, length: int, window: int | None) -> Tensor:
        """`[n, length + fed + 1]` bool: the positions of text and own branch that each query may
        read."""
        text = torch.arange(length, device=self.starts.device)
        # [n, fed + 1]
        own = self.starts[:, None] + torch.arange(self.fed + 1, device=self.starts.device)
        places = torch.cat([text.expand(len(own), length), own], 1)
        visible = torch.cat(
            [text < self.starts[:, None], torch.ones_like(own, dtype=torch.bool)], 1
        )
        if window:
            visible &= self.starts[:, None] + self.fed - places < window
        return visible


@contextmanager
def attending_as_branches(module: Any) -> Iterator[None]:
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
    """`TransformersBranches.attend` as transformers calls it, with a batch of one: `options` are
    its `scaling`, `softcap` and `sliding_window`, and `draftwell_branches`."""
    window = options.get("sliding_window") or getattr(module, "sliding_window", None)
    limits = (options.get("scaling"), options.get("softcap"), window)
    branch: TransformersBranches = options["draftwell_branches"]
    return branch.attend(module.layer_idx, query[0], key[0], value[0], *limits)[None], None
