"""A decoder layer, and the head, as functions of tensors alone, in forms that torch's compiler
makes fast for a few tokens.

Products are those of `packed_matmul`, which reads a weight once for all tokens; everything between
two of them is compiled, in float32. What is neither one row of a few tokens nor rows of one token,
such as parts of prompts and many drafts at once, goes through a layer in two halves, with attention
between them: compiled for the rows of one token among them and for a short row by itself, else
eager. Nothing here is called in a forward pass: `compiled_step` has it compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.runtime.models import quantised
from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.lean_layer import NORMS, Layer
from draftwell.serving.runtime.models.packed_matmul import packed, packed_matmul
from draftwell.serving.runtime.models.row_attention import weigh
from draftwell.serving.runtime.models.row_kernel import fits, row_attention

NO_WEIGHT = torch.empty(0)
"""Of the other half of a layer."""


class CompiledLayer(torch.nn.Module):
    """A layer over a few tokens.

    Args:
        layer: one of the wanted shape; its weights give way to the arguments of a call.
        names: what each of those is, of `packed_layer`.
        window: as in `Architecture.windows`.
    """

    attend: ClassVar[Callable[..., Tensor]]

    def __init__(self, layer: Layer, names: Sequence[str], window: int | None):
        super().__init__()
        self.layer, self.names, self.window = layer, names, window

    def forward(
        self,
        states: tuple[Tensor, Tensor, Tensor],
        memory: tuple[Tensor, Tensor],
        place: tuple[Tensor, ...],
        weights: list[Tensor],
    ) -> Tensor:
        """States before the layer → after it; keys and values are written into their slots.

        Args:
            states: `[n, hidden]`, and cosines and sines of the positions, `[n, 1, head_dim]`.
            memory, place: as the form's way to attend takes them.
        """
        x, cos, sin = (one.float() for one in states)
        layer = bound(self.layer, dict(zip(self.names, weights, strict=True)))
        attended = self.attend(layer.shape, self.window, layer.before(x, (cos, sin)), memory, place)
        return layer.after(attended, x).to(states[0].dtype)


def bound(layer: Layer, weights: Mapping[str, Tensor]) -> Layer:
    """A copy of a layer that computes with `weights`."""
    other = copy.copy(layer)
    for name in NORMS:
        setattr(other, name, weights[name].float() if name in weights else None)

    def made(name: str) -> Any:  # half a layer has half of the weights
        return partial(
            product,
            weight=weights.get(name, NO_WEIGHT),
            bias=weights.get(f"{name}.bias"),
            scale=weights.get(f"{name}.scale"),
        )

    other.qkv, other.out = made("qkv"), made("out")
    other.feed_forwards = [
        (made(f"gate_up{i}"), made(f"down{i}")) for i in range(len(layer.feed_forwards))
    ]
    return other


def packed_layer(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A layer's weights (`lean_layer.layer_weights`) with those of products as `product` reads
    them; int4 in torch's layout, as it is."""
    return {
        name: one if "." in name or name in NORMS or one.dtype == torch.uint8 else packed(one)
        for name, one in weights.items()
    }


def product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """`[n, in]` → `[n, out]`, float32, by a weight of `packed_layer`; `scale` as in
    `quantised.Rounded.stored`."""
    if weight.dtype == torch.uint8:
        assert scale is not None
        out = quantised.product(x.to(scale.dtype), (weight, scale)).float()
    else:
        x = x.to(torch.bfloat16 if scale is not None else weight.dtype)
        out = (
            packed_matmul(x.contiguous(), weight)
            if weight.dim() > 2
            else F.linear(x.float(), weight.float())
        )
        out = out if scale is None else out * scale.float()
    return out if bias is None else out + bias.float()


def kept(x: Tensor) -> Tensor:
    """x as it is, for a compiler that would compute it again wherever it is read, for every row of
    a weight or position of a slot."""
    # of a part of something the compiler keeps that part alone, not with the strides that it had
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def attend(
    shape: Architecture,
    window: int | None,
    heads: tuple[Tensor, Tensor, Tensor],
    memory: tuple[Tensor, Tensor],
    place: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Write keys and values into slots, and attend over them.

    Args:
        heads: query `[n, heads, head_dim]`, key and value `[n, kv_heads, head_dim]` of n tokens.
        memory: keys and values of all slots, `[slots, kv_heads, max_context, head_dim]`.
        place: slot and position of every token, both `[n]`, and the positions `[end]` to attend
            over.
    Returns:
        `[n, heads * head_dim]` float32.
    """
    query, key, value = heads
    slots, positions, columns = place
    for old, new in zip(memory, (key, value), strict=True):
        # of a transposed one with a single head the compiler copies all slots, there and back
        old[slots, :, positions] = new.to(old.dtype)
    # [n, kv_heads, end, head_dim]
    keys, values = (one[:, :, : columns.shape[0]][slots].float() for one in memory)
    ahead = positions[:, None, None] - columns
    seen = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
    grouped = kept(query.float()).reshape(
        query.shape[0], shape.kv_heads, shape.groups, 1, shape.head_dim
    )
    out = []
    # a loop each over the slots, from the cache after the first, is faster than one loop for all
    # groups
    for one in grouped.unbind(2):
        scores = (one * keys).sum(-1) * shape.scale
        if shape.attention_softcap is not None:
            scores = shape.attention_softcap * torch.tanh(scores / shape.attention_softcap)
        weights = kept(scores.masked_fill(~seen, float("-inf")).softmax(-1))
        out.append((weights[..., None] * values).sum(-2))
    return torch.stack(out, 2).reshape(query.shape[0], -1)


def attend_row(
    shape: Architecture,
    _: int | None,
    heads: tuple[Tensor, Tensor, Tensor],
    memory: tuple[Tensor, Tensor],
    place: tuple[Tensor, Tensor],
) -> Tensor:
    """Write keys and values into a slot, and attend over it by our kernel, or by torch's for heads
    of other sizes.

    Args:
        heads: as in `attend`.
        memory: keys and values of one slot, `[kv_heads, max_context, head_dim]`.
        place: positions of the tokens `[n]`, and `row_attention.additive`'s mask `[n, end]` of the
            slots' dtype (it knows the window).
    Returns:
        `[n, heads * head_dim]` float32.
    """
    query, key, value = heads
    positions, mask = place
    for old, new in zip(memory, (key, value), strict=True):
        old[:, positions] = new.to(old.dtype).transpose(0, 1)  # as in `attend`
    if fits(shape.head_dim):
        softcap = shape.attention_softcap or 0.0
        attended: Tensor = row_attention(
            query.float().contiguous(), *memory, mask.contiguous(), shape.scale, softcap
        )
        return attended
    keys, values = (one[None, :, : mask.shape[1]] for one in memory)
    folded = query.to(keys.dtype).transpose(0, 1).reshape(1, shape.kv_heads, -1, shape.head_dim)
    out = weigh(folded, keys, values, mask.repeat(shape.groups, 1), shape)
    return (
        out.reshape(shape.heads, -1, shape.head_dim)
        .transpose(0, 1)
        .reshape(query.shape[0], -1)
        .float()
    )


class OneToken(CompiledLayer):
    """One token of one row."""

    attend = staticmethod(attend)


class ManyRows(CompiledLayer):
    """Several rows of one token each."""

    attend = staticmethod(attend)


class OneRow(CompiledLayer):
    """Several tokens of one row."""

    attend = staticmethod(attend_row)


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
        return bound(self.layer, dict(zip(self.names, weights, strict=True)))

    @classmethod
    def share(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a layer's weights by name, those of this side."""
        return {name: one for name, one in weights.items() if name.startswith(cls.needs)}


class BeforeAttention(HalfLayer):
    """From the states to queries, keys and values."""

    needs = ("attention_norm", "qkv", "qk_norm")

    def forward(
        self, states: tuple[Tensor, Tensor, Tensor], weights: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States `[n, hidden]`, and cosines and sines `[n, 1, head_dim]` → as `Layer.before`, in
        the states' dtype."""
        x, cos, sin = (one.float() for one in states)
        query, key, value = (
            one.to(states[0].dtype) for one in self.bound(weights).before(x, (cos, sin))
        )
        return query, key, value


class AfterAttention(HalfLayer):
    """From what attention found to the states after the layer."""

    needs = ("out", "mlp_norm", "gate_up", "down", "after_attention", "after_mlp")

    def forward(self, states: tuple[Tensor, Tensor], weights: list[Tensor]) -> Tensor:
        """Attention's output `[n, heads * head_dim]` and the states before the layer → after it."""
        attended, x = states
        return self.bound(weights).after(attended, x.float()).to(x.dtype)


class RowsAttention(torch.nn.Module):
    """The attention alone of several rows of one token each, for forward passes in which other rows
    go along.

    Args:
        window: as in `Architecture.windows`.
    """

    def __init__(self, shape: Architecture, window: int | None):
        super().__init__()
        self.shape, self.window = shape, window

    def forward(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        memory: tuple[Tensor, Tensor],
        place: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """As `attend`, in the dtype of the heads."""
        return attend(self.shape, self.window, heads, memory, place).to(heads[0].dtype)


class OneRowAttention(torch.nn.Module):
    """The attention alone of several tokens of one row, likewise."""

    def __init__(self, shape: Architecture):
        super().__init__()
        self.shape = shape

    def forward(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        memory: tuple[Tensor, Tensor],
        place: tuple[Tensor, Tensor],
    ) -> Tensor:
        """As `attend_row`, in the dtype of the heads."""
        return attend_row(self.shape, None, heads, memory, place).to(heads[0].dtype)


class Head(torch.nn.Module):
    """The output head."""

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:
        """States `[n, hidden]`, weight `packed` → logits `[n, vocab]` float32."""
        return product(states.float(), weight, None)
