"""A decoder layer, and the head, as functions of tensors alone, in forms that torch's compiler makes fast for a few tokens.

Up to `FEW` tokens of a row multiply by sums that become one pass over a weight in blocks of outputs (`in_blocks`). More tokens, and
several rows, multiply by oneDNN's kernels, with weights in its layout, and everything between two products is compiled. Numbers between
two products are float32.
All other tokens, such as parts of prompts and drafts of several requests, go through a layer in two halves, with attention between them:
compiled for the rows of one token among them, eager for the others.
Nothing here is called in a forward pass: `compiled_step` has it compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from serving.runtime.models import quantised
from serving.runtime.models.architecture import Architecture
from serving.runtime.models.lean_layer import NORMS, Layer
from serving.runtime.models.row_attention import weigh

BLOCK = 16
"""Outputs that lie side by side for every input: one vector of float32 with AVX-512, so that no sum runs across a vector."""
FEW = 4
"""Tokens that one pass over a weight serves well: products of four took three quarters of oneDNN's time, of eight nine tenths, of sixteen
more than it (docs/log.md, "Two to four tokens in one pass")."""


class CompiledLayer(torch.nn.Module):
    """A layer over a few tokens.

    Args:
        layer: one of the wanted shape; its weights give way to the arguments of a call.
        names: what each of those is (`in_blocks` of `lean_layer.layer_weights`, or where products are oneDNN's `packed_weights`).
        window: as in `Architecture.windows`.
    """

    product: ClassVar[Callable[..., Tensor]]
    attend: ClassVar[Callable[..., Tensor]]

    def __init__(self, layer: Layer, names: Sequence[str], window: int | None):
        super().__init__()
        self.layer, self.names, self.window = layer, names, window

    def forward(self, states: tuple[Tensor, Tensor, Tensor], memory: tuple[Tensor, Tensor], place: tuple[Tensor, ...],
                weights: list[Tensor]) -> Tensor:
        """States before the layer → after it; keys and values are written into their slots.

        Args:
            states: `[n, hidden]`, and cosines and sines of the positions, `[n, 1, head_dim]`.
            memory, place: as the form's way to attend takes them.
        """
        x, cos, sin = (one.float() for one in states)
        layer = bound(self.layer, dict(zip(self.names, weights, strict=True)), self.product)
        attended = self.attend(layer.shape, self.window, layer.before(x, (cos, sin)), memory, place)
        return layer.after(attended, x).to(states[0].dtype)


def bound(layer: Layer, weights: Mapping[str, Tensor], product: Callable[..., Tensor]) -> Layer:
    """A copy of a layer that computes with `weights`."""
    other = copy.copy(layer)
    for name in NORMS:
        setattr(other, name, weights[name].float() if name in weights else None)

    def made(name: str) -> Any:
        return partial(product, weight=weights.get(name), bias=weights.get(f"{name}.bias"), scale=weights.get(f"{name}.scale"))

    other.qkv, other.out = made("qkv"), made("out")
    other.feed_forwards = [(made(f"gate_up{i}"), made(f"down{i}")) for i in range(len(layer.feed_forwards))]
    return other


def in_blocks(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer's weights with those of products as `product` reads them fastest: `[out / BLOCK, in, BLOCK]` instead of `[out, in]`.

    All stay as they are where some are int4, whose layout serves any number of tokens; so do outputs that fill no blocks.
    """
    if any(one.dtype == torch.uint8 for one in weights.values()):
        return dict(weights)
    return {name: one if "." in name or name in NORMS else blocked(one) for name, one in weights.items()}


def blocked(weight: Tensor) -> Tensor:
    """`[out, in]` → `[out / BLOCK, in, BLOCK]`, where that comes out even."""
    outputs, inputs = weight.shape
    return weight if outputs % BLOCK else weight.view(-1, BLOCK, inputs).transpose(1, 2).contiguous()


def product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """`[n, in]` → `[n, out]`, float32, for a few tokens, by a weight of `in_blocks`; `scale` as in `quantised.Rounded.stored`.

    A sum for each token, so that the compiler reads a weight once, for all of them. Each sum keeps a leading axis of 1, so that `cat` has
    it written into its place instead of copied there.
    """
    if weight.dtype == torch.uint8:
        return packed_product(x, weight, bias, scale)
    x, whole = kept(x), weight.float()[None]
    if weight.dim() == 3:
        out = torch.cat([(whole * one[:, :, None]).sum(-2) for one in x[:, None].unbind()]).flatten(1)
    else:
        out = torch.cat([(whole * one).sum(-1) for one in x[:, None].unbind()])
    out = out if scale is None else out * scale.float()
    return out if bias is None else out + bias.float()


def kept(x: Tensor) -> Tensor:
    """x as it is, for a compiler that would compute it again wherever it is read, for every row of a weight or position of a slot."""
    x = x.contiguous()  # of a part of something the compiler keeps that part alone, not with the strides that it had
    return x.as_strided(x.shape, x.stride())


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """`[n, in]` → `[n, out]`, float32, by oneDNN with a weight in its layout, or by torch's int4 kernel with one in that's."""
    if scale is None:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, bias, "none", [], "")
        return out.float()
    out = quantised.product(x.to(scale.dtype), (weight, scale)).float()
    return out if bias is None else out + bias.float()


def attend(shape: Architecture, window: int | None, heads: tuple[Tensor, Tensor, Tensor], memory: tuple[Tensor, Tensor],
           place: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Write keys and values into slots, and attend over them.

    Args:
        heads: query `[n, heads, head_dim]`, key and value `[n, kv_heads, head_dim]` of n tokens.
        memory: keys and values of all slots, `[slots, kv_heads, max_context, head_dim]`.
        place: slot and position of every token, both `[n]`, and the positions `[end]` to attend over.
    Returns:
        `[n, heads * head_dim]` float32.
    """
    query, key, value = heads
    slots, positions, columns = place
    for old, new in zip(memory, (key, value), strict=True):
        old[slots, :, positions] = new.to(old.dtype)  # of a transposed one with a single head the compiler copies all slots, there and back
    keys, values = (one[:, :, : columns.shape[0]][slots].float() for one in memory)  # [n, kv_heads, end, head_dim]
    ahead = positions[:, None, None] - columns
    seen = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
    grouped = kept(query.float()).reshape(query.shape[0], shape.kv_heads, shape.groups, 1, shape.head_dim)
    out = []
    for one in grouped.unbind(2):  # a loop each over the slots, from the cache after the first, is faster than one loop for all groups
        scores = (one * keys).sum(-1) * shape.scale
        if shape.attention_softcap is not None:
            scores = shape.attention_softcap * torch.tanh(scores / shape.attention_softcap)
        weights = kept(scores.masked_fill(~seen, float("-inf")).softmax(-1))
        out.append((weights[..., None] * values).sum(-2))
    return torch.stack(out, 2).reshape(query.shape[0], -1)


def attend_row(shape: Architecture, _: int | None, heads: tuple[Tensor, Tensor, Tensor], memory: tuple[Tensor, Tensor],
               place: tuple[Tensor, Tensor]) -> Tensor:
    """Write keys and values into a slot, and attend over it by torch's kernel, as `row_attention.OneRow` does.

    Args:
        heads: as in `attend`.
        memory: keys and values of one slot, `[kv_heads, max_context, head_dim]`.
        place: positions of the tokens `[n]`, and `row_attention.additive`'s mask `[n, end]` of the slots' dtype (it knows the window).
    Returns:
        `[n, heads * head_dim]` float32.
    """
    query, key, value = heads
    positions, mask = place
    for old, new in zip(memory, (key, value), strict=True):
        old[:, positions] = new.to(old.dtype).transpose(0, 1)  # as in `attend`
    keys, values = (one[None, :, : mask.shape[1]] for one in memory)
    folded = query.to(keys.dtype).transpose(0, 1).reshape(1, shape.kv_heads, -1, shape.head_dim)
    out = weigh(folded, keys, values, mask.repeat(shape.groups, 1), shape)
    return out.reshape(shape.heads, -1, shape.head_dim).transpose(0, 1).reshape(query.shape[0], -1).float()


class OneToken(CompiledLayer):
    """One token of one row."""

    product, attend = staticmethod(product), staticmethod(attend)


class FewTokens(CompiledLayer):
    """`FEW` tokens of one row."""

    product, attend = staticmethod(product), staticmethod(attend_row)


class ManyRows(CompiledLayer):
    """Several rows of one token each."""

    product, attend = staticmethod(packed_product), staticmethod(attend)


class OneRow(CompiledLayer):
    """More tokens of one row; any number with int4 weights."""

    product, attend = staticmethod(packed_product), staticmethod(attend_row)


class HalfLayer(torch.nn.Module):
    """What a layer computes on one side of its attention, over any number of tokens but one.

    Args:
        layer: as for `CompiledLayer`.
        names: what the weights of a call are, of `needs` those that the layer has.
    """

    needs: ClassVar[tuple[str, ...]]

    def __init__(self, layer: Layer, names: Sequence[str]):
        super().__init__()
        self.layer, self.names = layer, names

    def bound(self, weights: Sequence[Tensor]) -> Layer:
        """The layer with the weights of a call, as far as this side needs them."""
        return bound(self.layer, dict(zip(self.names, weights, strict=True)), packed_product)

    @classmethod
    def share(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a layer's weights by name, those of this side."""
        return {name: one for name, one in weights.items() if name.startswith(cls.needs)}


class BeforeAttention(HalfLayer):
    """From the states to queries, keys and values."""

    needs = ("attention_norm", "qkv", "qk_norm")

    def forward(self, states: tuple[Tensor, Tensor, Tensor], weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """States `[n, hidden]`, and cosines and sines `[n, 1, head_dim]` → as `Layer.before`, in the states' dtype."""
        x, cos, sin = (one.float() for one in states)
        query, key, value = (one.to(states[0].dtype) for one in self.bound(weights).before(x, (cos, sin)))
        return query, key, value


class AfterAttention(HalfLayer):
    """From what attention found to the states after the layer."""

    needs = ("out", "mlp_norm", "gate_up", "down", "after_attention", "after_mlp")

    def forward(self, states: tuple[Tensor, Tensor], weights: list[Tensor]) -> Tensor:
        """Attention's output `[n, heads * head_dim]` and the states before the layer → after it."""
        attended, x = states
        return self.bound(weights).after(attended, x.float()).to(x.dtype)


class RowsAttention(torch.nn.Module):
    """The attention alone of several rows of one token each, for forward passes in which other rows go along.

    Args:
        window: as in `Architecture.windows`.
    """

    def __init__(self, shape: Architecture, window: int | None):
        super().__init__()
        self.shape, self.window = shape, window

    def forward(self, heads: tuple[Tensor, Tensor, Tensor], memory: tuple[Tensor, Tensor], place: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """As `attend`, in the dtype of the heads."""
        return attend(self.shape, self.window, heads, memory, place).to(heads[0].dtype)


class Head(torch.nn.Module):
    """The output head for a few tokens."""

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:
        """States `[n, hidden]`, weight `[vocab, hidden]` or in blocks → logits `[n, vocab]` float32."""
        return product(states.float(), weight, None)
