"""The one decoder layer of an EAGLE-3 head, and the same compiled for a few pairs of one row
(`Eagle3Row`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.compiled_layer import attend_row, packed_layer, product
from draftwell.serving.runtime.models.compiled_library import (
    FEW,
    VARIES,
    Runner,
    build_library,
    digest,
    library,
)
from draftwell.serving.runtime.models.compiled_step import Compile, loaded
from draftwell.serving.runtime.models.lean_layer import Rope, norm, stored
from draftwell.serving.runtime.models.linear import Linear

NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
PRODUCTS = ("qkv", "out", "gate_up", "down", "head")


class Eagle3Layer:
    """The layer as functions of tensors.

    Args:
        products: by the names in `PRODUCTS`.
        norms: weights `[hidden]` by the names in `NORMS`.
    """

    def __init__(
        self, products: Mapping[str, Linear], norms: Mapping[str, Tensor], shape: Architecture
    ):
        self.products, self.norms, self.shape = products, norms, shape

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
        # len would be a constant of a library
        heads = self.products["qkv"](x).view(x.shape[0], -1, shape.head_dim)
        qk = heads[:, :rotated]
        qk = torch.addcmul(qk * rope[0], qk.roll(shape.head_dim // 2, -1), rope[1]).to(x.dtype)
        return qk[:, : shape.heads], qk[:, shape.heads :], heads[:, rotated:]

    def after(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """States `[n, hidden]` after the layer, of attention's output `[n, heads * head_dim]` and
        the states before it."""
        hidden = hidden + self.products["out"](attended)
        gate, up = self.products["gate_up"](
            norm(hidden, self.norms["post_attention_layernorm"], self.shape.eps)
        ).chunk(2, -1)
        return hidden + self.products["down"](F.silu(gate) * up)

    def predict(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised states `[n, hidden]`, and logits `[n, head]` float32."""
        normed = norm(states, self.norms["norm"], self.shape.eps)
        return normed, self.products["head"](normed).float()


class Eagle3Row(torch.nn.Module):
    """A few pairs of one row.

    Args:
        names: what the weights of a call are: `PRODUCTS` as `compiled_layer.product` reads them,
            with scales, and `NORMS`.
    """

    def __init__(self, shape: Architecture, names: Sequence[str]):
        super().__init__()
        self.shape, self.names = shape, tuple(names)

    def forward(
        self,
        states: tuple[Tensor, Tensor, Tensor, Tensor],
        memory: tuple[Tensor, Tensor],
        place: tuple[Tensor, Tensor],
        weights: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States after the layer and the same normalised, `[n, hidden]`, and logits `[n, head]`
        float32.

        Args:
            states: embeddings and states before it, `[n, hidden]`, cosines and sines of their
                positions, `[n, 1, head_dim]`.
            memory, place: as in `compiled_layer.attend_row`.
        """
        embedded, hidden, cos, sin = states
        found = dict(zip(self.names, weights, strict=True))
        products = {
            name: partial(product, weight=found[name], bias=None, scale=found.get(f"{name}.scale"))
            for name in PRODUCTS
        }
        layer = Eagle3Layer(products, {name: found[name].float() for name in NORMS}, self.shape)
        heads = layer.before(embedded.float(), hidden.float(), (cos, sin))
        after = layer.after(attend_row(self.shape, None, heads, memory, place), hidden.float())
        normed, logits = layer.predict(after)
        return after.to(hidden.dtype), normed.to(hidden.dtype), logits


def compiled_row(
    layer: Eagle3Layer, whole: Mapping[str, Tensor], wanted: Compile, folders: Sequence[Path]
) -> tuple[Callable[[list[Tensor]], list[Tensor]], Path] | None:
    """What computes an `Eagle3Row` of its arguments but the weights, and its library; None where
    there is none.

    Args:
        whole: the weights `[out, in]` of `PRODUCTS`.
    """
    weights: dict[str, Tensor] = {}
    for name in PRODUCTS:
        weights |= packed_layer(stored(name, whole[name], layer.products[name]))
    if any(one.dim() == 2 for one in weights.values()):
        return None  # outputs that fill no blocks
    weights |= layer.norms
    shape, module = layer.shape, Eagle3Row(layer.shape, list(weights))
    file = library(
        digest(
            Eagle3Row.__name__,
            shape,
            Path(__file__).read_text(),
            [(name, tuple(one.shape), str(one.dtype)) for name, one in weights.items()],
        ),
        folders,
    )
    runner: Runner | None = loaded(file, wanted, partial(build, module, weights, file))
    if runner is None:
        return None
    run, values = runner.run, list(weights.values())
    return lambda arguments: run([*arguments, *values]), file


def build(module: Eagle3Row, weights: Mapping[str, Tensor], file: Path) -> None:
    """Compile a head for a few pairs of one row into the shared library `file`."""
    shape, hidden = module.shape, len(weights["norm"])
    states = [torch.zeros(FEW, hidden, dtype=torch.bfloat16) for _ in range(2)]
    rope = [torch.zeros(FEW, 1, shape.head_dim) for _ in range(2)]
    memory = tuple(
        torch.zeros(shape.kv_heads, 48, shape.head_dim, dtype=torch.bfloat16) for _ in range(2)
    )
    place = torch.arange(5, 5 + FEW), torch.zeros(FEW, 9, dtype=torch.bfloat16)
    dense: list[Any] = [torch.zeros(one.shape, dtype=one.dtype) for one in weights.values()]
    build_library(
        module,
        ((*states, *rope), memory, place, dense),
        (
            ({0: VARIES},) * 4,
            ({1: VARIES},) * 2,
            ({0: VARIES}, {0: VARIES, 1: VARIES}),
            [None] * len(dense),
        ),
        file,
    )
