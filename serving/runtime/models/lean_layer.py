"""One decoder layer without a module between its matrices; what differs between families is data
(`architecture`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.linear import Linear, MakeLinear
from draftwell.serving.runtime.models.padding import feed_forwards

NORMS = ("attention_norm", "mlp_norm", "after_attention", "after_mlp", "qk_norm")
Rope = tuple[Tensor, Tensor]
"""Cosines and signed sines `[total, 1, head_dim]`."""


class Layer:
    """Weights of one decoder layer, and what it computes before and after its attention.

    Args:
        layer: the module's.
        make: how a weight `[out, in]` and its bias become a product.
    """

    def __init__(self, layer: Any, make: MakeLinear, shape: Architecture):
        self.shape = shape
        attention = layer.self_attn
        self.attention_norm = norm_weight(layer.input_layernorm, shape)
        self.mlp_norm = norm_weight(
            layer.pre_feedforward_layernorm if shape.sandwich else layer.post_attention_layernorm,
            shape,
        )
        self.after_attention = (
            norm_weight(layer.post_attention_layernorm, shape) if shape.sandwich else None
        )
        self.after_mlp = (
            norm_weight(layer.post_feedforward_layernorm, shape) if shape.sandwich else None
        )
        self.qk_norm = qk_norm_weight(attention, shape)
        parts = projections(layer)
        self.qkv, self.out = make(*parts["qkv"]), make(*parts["out"])
        self.feed_forwards = [
            (make(*parts[f"gate_up{i}"]), make(*parts[f"down{i}"]))
            for i in range(len(feed_forwards(layer.mlp)))
        ]
        self.activation: Callable[[Tensor], Tensor] = (
            F.silu if shape.activation == "silu" else partial(F.gelu, approximate="tanh")
        )

    def products(self) -> dict[str, Linear]:
        """The products by the names of `projections`."""
        fed = {
            f"{name}{i}": product
            for i, pair in enumerate(self.feed_forwards)
            for name, product in zip(("gate_up", "down"), pair, strict=True)
        }
        return {"qkv": self.qkv, "out": self.out, **fed}

    def norms(self) -> dict[str, Tensor]:
        """Weights of the norms that the layer has."""
        found = {name: getattr(self, name) for name in NORMS}
        return {name: weight for name, weight in found.items() if weight is not None}

    def before(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each `[total, its heads, head_dim]`, of states `[total,
        hidden]`."""
        shape, rotated = self.shape, self.shape.heads + self.shape.kv_heads
        qkv = self.qkv(norm(x, self.attention_norm, shape.eps)).view(x.shape[0], -1, shape.head_dim)
        qk = qkv[:, :rotated]
        if self.qk_norm is not None:
            qk = (F.rms_norm(qk.float(), qk.shape[-1:], None, shape.eps) * self.qk_norm).to(x.dtype)
        qk = torch.addcmul(qk * rope[0], qk.roll(shape.head_dim // 2, -1), rope[1])
        return qk[:, : shape.heads], qk[:, shape.heads :], qkv[:, rotated:]

    def after(self, attended: Tensor, x: Tensor) -> Tensor:
        """States `[total, hidden]` after the layer, of attention's output `[total, heads *
        head_dim]` and the states before it."""
        return self.after_feed_forward(self.after_attending(attended, x))

    def after_attending(self, attended: Tensor, x: Tensor) -> Tensor:
        """As `after`, without the feed-forward."""
        return x + norm(self.out(attended), self.after_attention, self.shape.eps)

    def after_feed_forward(self, x: Tensor) -> Tensor:
        """States `[total, hidden]` after the feed-forward, of those before it."""
        normed = norm(x, self.mlp_norm, self.shape.eps)
        fed = reduce(
            torch.add, [self._feed_forward(normed, *products) for products in self.feed_forwards]
        )
        return x + norm(fed, self.after_mlp, self.shape.eps)

    def _feed_forward(self, x: Tensor, gate_up: Linear, down: Linear) -> Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(self.activation(gate).mul_(up))


def projections(layer: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Weight and bias of every product of a module's layer; of feed-forwards there are two where
    the target is padded."""
    parts = {
        "qkv": joined(layer.self_attn, "qkv_proj", "q_proj", "k_proj", "v_proj"),
        "out": joined(layer.self_attn, "o_proj"),
    }
    for i, mlp in enumerate(feed_forwards(layer.mlp)):
        parts |= {
            f"gate_up{i}": joined(mlp, "gate_up_proj", "gate_proj", "up_proj"),
            f"down{i}": joined(mlp, "down_proj"),
        }
    return parts


def joined(holder: Any, whole: str, *parts: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the projection `whole`, or of `parts` one below the other where the holder
    has those."""
    found = [
        getattr(holder, name)
        for name in (parts if parts and hasattr(holder, parts[0]) else [whole])
    ]
    weight = torch.cat([part.weight for part in found]) if len(found) > 1 else found[0].weight
    return weight, None if found[0].bias is None else torch.cat([part.bias for part in found])


def norm_weight(part: Any, shape: Architecture) -> Tensor:
    """The weight of a norm, `[size]`; in float32 where something is added to what is stored, as its
    family computes it."""
    weight: Tensor = part.weight.detach()
    return weight.float() + shape.norm_offset if shape.norm_offset else weight


def qk_norm_weight(attention: Any, shape: Architecture) -> Tensor | None:
    """Weights `[heads + kv_heads, head_dim]` of the norms of queries and keys, or None where there
    are none."""
    if not hasattr(attention, "q_norm"):
        return None
    query, key = norm_weight(attention.q_norm, shape), norm_weight(attention.k_norm, shape)
    return torch.cat([query.expand(shape.heads, -1), key.expand(shape.kv_heads, -1)])


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm of the last axis in `weight`'s precision; x as it is where the weight
    is None."""
    if weight is None:
        return x
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)
