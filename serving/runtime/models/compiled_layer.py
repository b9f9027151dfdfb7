"""A decoder layer as a function of tensors alone, in a form that torch's compiler makes fast for one token.

A product is written as sums along the rows of its weight, which become one pass over the weight as it is stored; attention reads the slots
where they lie. Numbers between two products are float32. Nothing here is called in a forward pass: `compiled_step` has it compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from serving.runtime.models.architecture import Architecture
from serving.runtime.models.lean_layer import NORMS, Layer


class OneToken(torch.nn.Module):
    """A layer over one token of one row.

    Args:
        layer: one of the wanted shape; its weights give way to the arguments of a call.
        names: what each of those is (`lean_layer.layer_weights`).
        window: as in `Architecture.windows`.
    """

    def __init__(self, layer: Layer, names: Sequence[str], window: int | None):
        super().__init__()
        self.layer, self.names, self.window = layer, names, window

    def forward(self, states: tuple[Tensor, Tensor, Tensor], memory: tuple[Tensor, Tensor], place: tuple[Tensor, Tensor, Tensor],
                weights: list[Tensor]) -> Tensor:
        """States before the layer → after it; keys and values are written into their slot.

        Args:
            states: `[1, hidden]`, and cosines and sines of the position, `[1, 1, head_dim]`.
            memory, place: as in `attend`.
        """
        x, cos, sin = (one.float() for one in states)
        layer = bound(self.layer, dict(zip(self.names, weights, strict=True)))
        attended = attend(layer.shape, self.window, layer.before(x, (cos, sin)), memory, place)
        return layer.after(attended, x).to(states[0].dtype)


def bound(layer: Layer, weights: Mapping[str, Tensor]) -> Layer:
    """A copy of a layer that computes with `weights`."""
    other = copy.copy(layer)
    for name in NORMS:
        setattr(other, name, weights[name].float() if name in weights else None)

    def made(name: str) -> Any:
        return partial(product, weight=weights[name], bias=weights.get(f"{name}.bias"), scale=weights.get(f"{name}.scale"),
                       zero=weights.get(f"{name}.zero"))

    other.qkv, other.out = made("qkv"), made("out")
    other.feed_forwards = [(made(f"gate_up{i}"), made(f"down{i}")) for i in range(len(layer.feed_forwards))]
    return other


def product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """`[1, in]` → `[1, out]`, float32, by a weight `[out, in]`; rounded, with its scale and zero, as in `quantised.Rounded`."""
    once = x.as_strided(x.shape, (x.shape[1], 1))  # keeps the compiler from computing x again for every row of the weight
    out = (weight.float() * once).sum(-1) if zero is None else product_int4(once, weight, scale, zero)
    if scale is not None and zero is None:
        out = out * scale.float()
    return out[None] if bias is None else out[None] + bias.float()


def product_int4(x: Tensor, whole: Tensor, scale: Tensor | None, zero: Tensor) -> Tensor:
    """`[1, in]` → `[out]` by `Rounded` numbers; a zero counts once for all inputs of its group."""
    assert scale is not None
    low, high = x.view(1, whole.shape[1], 2, whole.shape[2]).unbind(2)
    summed = (((whole & 15).float() - 8) * low + ((whole >> 4).float() - 8) * high).sum(-1)
    inputs = (low + high).sum(-1)
    return (summed * scale.float() + inputs * zero.float()).sum(-1)


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
        old.transpose(1, 2)[slots, positions] = new.to(old.dtype)
    keys, values = (one[:, :, : columns.shape[0]][slots].float()[:, :, None] for one in memory)  # [n, kv_heads, 1, end, head_dim]
    grouped = query.float().reshape(query.shape[0], shape.kv_heads, shape.groups, 1, shape.head_dim)
    scores = (grouped * keys).sum(-1) * shape.scale
    if shape.attention_softcap is not None:
        scores = shape.attention_softcap * torch.tanh(scores / shape.attention_softcap)
    ahead = positions[:, None] - columns
    seen = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return (weights[..., None] * values).sum(-2).reshape(query.shape[0], -1)
