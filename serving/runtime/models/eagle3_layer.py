"""The one decoder layer of an EAGLE-3 head, by torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.lean_layer import Rope, norm
from draftwell.serving.runtime.models.linear import Linear

NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")


class Eagle3Layer:
    """The layer as functions of tensors.

    Args:
        products: qkv, out, gate_up, down and head.
        norms: weights `[hidden]` by the names in `NORMS`.
        norm_before_residual: the residual is what `hidden_norm` gives, not what it reads.
    """

    def __init__(
        self,
        products: Mapping[str, Linear],
        norms: Mapping[str, Tensor],
        shape: Architecture,
        *,
        norm_before_residual: bool = False,
    ):
        self.products, self.norms, self.shape = products, norms, shape
        self.norm_before_residual = norm_before_residual

    def before(self, embedded: Tensor, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each `[n, its heads, head_dim]`, of embeddings and states, both
        `[n, hidden]`."""
        shape, rotated = self.shape, self.shape.heads + self.shape.kv_heads
        x = torch.cat(
            [
                norm(embedded, self.norms["input_layernorm"], shape.eps),
                norm(hidden, self.norms["hidden_norm"], shape.eps),
            ],
            -1,
        )
        heads = self.products["qkv"](x).view(x.shape[0], -1, shape.head_dim)
        qk = heads[:, :rotated]
        qk = torch.addcmul(qk * rope[0], qk.roll(shape.head_dim // 2, -1), rope[1]).to(x.dtype)
        return qk[:, : shape.heads], qk[:, shape.heads :], heads[:, rotated:]

    def after(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """States `[n, hidden]` after the layer, of attention's output `[n, heads * head_dim]` and
        the states before it."""
        if self.norm_before_residual:
            hidden = norm(hidden, self.norms["hidden_norm"], self.shape.eps)
        hidden = hidden + self.products["out"](attended)
        gate, up = self.products["gate_up"](
            norm(hidden, self.norms["post_attention_layernorm"], self.shape.eps)
        ).chunk(2, -1)
        return hidden + self.products["down"](F.silu(gate) * up)

    def predict(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised states `[n, hidden]`, and logits `[n, head]` float32."""
        normed = norm(states, self.norms["norm"], self.shape.eps)
        return normed, self.products["head"](normed).float()
