"""Products with a fixed weight, each kept in the layout that its kernel reads fastest."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.artifacts.rounding import quantise
from draftwell.serving.device import lacks_bfloat16
from draftwell.serving.number_format import Weights
from draftwell.serving.runtime.models.quantised import product, rounded

Linear = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""A weight `[out, in]` and its bias `[out]` → their product."""
INT8_ROWS = 2
"""Rows up to which 8-bit weights win: 203 against 312 µs for one row of 3072 × 576, 274 against 310
for four (one core)."""
ROUNDED_ROWS: dict[Weights, int] = {"int8": 2, "int4": 8}
"""Rows up to which a target's rounded weights win (docs/log.md, "Weights of fewer bytes")."""
WIDENED_ROWS = 8
"""Rows up to which a processor without instructions for bfloat16 multiplies in it. In float32 128
rows of 3072 × 576 take 3.4 ms instead of 23.9, eight 1.1 instead of 1.5, one .30 instead of .19; of
8192 × 576 eight take 4.6 instead of 4.1 (two cores of a Zen 3)."""
PACKED_FOR_ROWS = 8
"""Rows that oneDNN's weight layout is chosen for; layouts chosen for 1 to 64 rows were measured
within 3 %."""


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x `[rows, in]` → `x @ weight.T + bias` for a weight `[out, in]`; on CPUs bfloat16 weights are
    packed for oneDNN once.

    float32 keeps torch's own product, whose results are what `transformers.generate` is compared
    with.
    """
    weight = weight.detach().contiguous()
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
        return WidenedLinear(weight, bias) if lacks_bfloat16() else PackedLinear(weight, bias)
    return lambda x: F.linear(x, weight, bias)


class WidenedLinear:
    """A product of bfloat16 on a processor that has no instructions for it: many rows are
    multiplied in float32.

    The weight is made float32 each time, which is dear for a few rows and saves a second copy of
    it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`."""
        if x.shape[0] <= WIDENED_ROWS:
            return F.linear(x, self._weight, self._bias)
        bias = None if self._bias is None else self._bias.float()
        return F.linear(x.float(), self._weight.float(), bias).to(x.dtype)


class PackedLinear:
    """A product of bfloat16 by oneDNN.

    Attributes:
        packed: the weight, in oneDNN's layout.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        self._bias, self._product = bias, torch.ops.mkldnn._linear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`."""
        out: Tensor = self._product(x, self.packed, self._bias, "none", [], "")
        return out


class Int8Linear:
    """As `linear`, with the weight rounded to int8 per output channel: at one or two rows only half
    the bytes are read.

    More rows multiply by the same rounded weight in bfloat16, where the matrix unit is faster than
    the narrower read.

    Attributes:
        rounded: the int8 weight `[out, in]` and its scales `[out]`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        whole, scale = quantise(weight)
        self._wide = linear((whole * scale[:, None]).to(weight.dtype), bias)
        self.rounded = whole, scale.to(weight.dtype)
        self._plus = 0 if bias is None else bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`."""
        return (
            torch._weight_int8pack_mm(x, *self.rounded) + self._plus
            if x.shape[0] <= INT8_ROWS
            else self._wide(x)
        )


class RoundedLinear:
    """As `linear`, with the weight rounded (`quantised`): on CPUs a few bfloat16 rows read the
    rounded weight itself.

    More rows multiply by a second copy of it in the model's dtype, in the layout of the matrix
    unit, where that is faster.

    Attributes:
        rounded: what a few rows read, `Rounded.stored`; None in other dtypes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, weights: Weights):
        whole = rounded(weight, weights)
        self._wide = linear(whole.dense().to(weight.dtype), bias)
        self.rounded = None if not isinstance(self._wide, PackedLinear) else whole.stored()
        self._few, self._plus = (
            ROUNDED_ROWS["int8" if whole.zero is None else "int4"],
            0 if bias is None else bias,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` → `[rows, out]`."""
        return (
            self._wide(x)
            if self.rounded is None or x.shape[0] > self._few
            else product(x, self.rounded) + self._plus
        )
