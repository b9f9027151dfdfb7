"""Products with a fixed weight, each kept in the layout that its kernel reads fastest."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from serving.artifacts.distilled_draft import quantise
from serving.device import lacks_bfloat16
from serving.number_format import Weights
from serving.runtime.models.quantised import GROUP, Rounded, rounded

Linear = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""A weight `[out, in]` and its bias `[out]` → their product."""
INT8_ROWS = 2
"""Rows up to which 8-bit weights win: 203 against 312 µs for one row of 3072 × 576, 274 against 310 for four (one core)."""
FEW: dict[Weights, int] = {"int8": 2, "int4": 2}
"""Rows up to which rounded weights win."""
PACKED_FOR_ROWS = 8
"""Rows that oneDNN's weight layout is chosen for; layouts chosen for 1 to 64 rows were measured within 3 %."""


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x `[rows, in]` → `x @ weight.T + bias` for a weight `[out, in]`; on CPUs bfloat16 weights are packed for oneDNN once.

    float32 keeps torch's own product, whose results are what `transformers.generate` is compared with.
    """
    weight = weight.detach().contiguous()
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not lacks_bfloat16():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        product = torch.ops.mkldnn._linear_pointwise
        return lambda x: product(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


def linear_int8(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """As `linear`, with the weight rounded to int8 per output channel: at one or two rows only half the bytes are read.

    More rows multiply by the same rounded weight in bfloat16, where the matrix unit is faster than the narrower read.
    """
    whole, scale = quantise(weight)
    wide = linear((whole * scale[:, None]).to(weight.dtype), bias)
    scale = scale.to(weight.dtype)
    plus = 0 if bias is None else bias
    return lambda x: torch._weight_int8pack_mm(x, whole, scale) + plus if x.shape[0] <= INT8_ROWS else wide(x)


class RoundedLinear:
    """As `linear`, with the weight rounded (`quantised`). On CPUs bfloat16 rows up to `FEW` read the rounded weight itself.

    More rows multiply by a second copy of it in the model's dtype, in the layout of the matrix unit, where that is faster.

    Attributes:
        rounded: what the weight was rounded to.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, weights: Weights):
        self.rounded, self._plus = rounded(weight, weights), 0 if bias is None else bias
        self._many = linear(self.rounded.dense().to(weight.dtype), bias)
        narrow = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not lacks_bfloat16()
        self._few_rows = FEW[weights] if narrow else 0
        self._few = narrow_product(self.rounded) if narrow else self._many

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`."""
        return self._few(x) + self._plus if x.shape[0] <= self._few_rows else self._many(x)


def narrow_product(weight: Rounded) -> Linear:
    """The product that reads a rounded weight as it is, for bfloat16 rows."""
    if weight.zero is None:
        return lambda x: torch._weight_int8pack_mm(x, weight.whole, weight.scale)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.numbers().flatten(1).int(), 1)
    scales = torch.stack([weight.scale.T, weight.zero.T], dim=-1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)
