"""Weights of fewer bytes, and the products that read them.

A weight is rounded once, when it is loaded, and the model is then *that* model: every path, whatever its dtype and its number of rows,
multiplies by the same rounded weight. So a strategy that is lossless gives what plain decoding with these weights gives; how far that is
from the full weights is measured by the gate (`components/gate/weights_check.py`).

- int8: `whole * scale`, a scale for each output channel, symmetric.
- int4: `(whole - 8) * scale + zero`, a scale and a zero for each `GROUP` inputs of an output channel, from their least to their largest
  weight, as llama.cpp's Q4_1 has them: 5 bits a weight.

Scales and zeros are bfloat16 numbers in every dtype, as torch's kernels want them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from serving.errors import DraftwellError
from serving.number_format import Weights

GROUP = 32
"""Inputs that share a scale and a zero in int4."""
LEAST = 1e-8
"""Smallest scale, of a channel or group without any weight (a padded target has those)."""


class Rounded(NamedTuple):
    """A weight `[out, in]` in fewer bytes.

    Args:
        whole: int8 `[out, in]`; or uint8 `[out, groups, GROUP / 2]`: the first inputs of a group in the low halves, the others in the high.
        scale: bfloat16 `[out]`, or `[out, groups]`.
        zero: bfloat16 `[out, groups]` of int4.
    """

    whole: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def numbers(self) -> Tensor:
        """int4's whole numbers, 0 to 15, `[out, groups, GROUP]`."""
        return torch.cat([self.whole & 15, self.whole >> 4], dim=-1)

    def dense(self) -> Tensor:
        """The rounded weight, float32 `[out, in]`."""
        if self.zero is None:
            return self.whole.float() * self.scale.float()[:, None]
        return ((self.numbers().float() - 8) * self.scale.float()[..., None] + self.zero.float()[..., None]).flatten(1)


def rounded(weight: Tensor, weights: Weights) -> Rounded:
    """A weight `[out, in]` in fewer bytes.

    Raises:
        DraftwellError: int4, and the inputs are no multiple of `GROUP`.
    """
    return _int8(weight.detach().float()) if weights == "int8" else _int4(weight.detach().float())


def _int8(weight: Tensor) -> Rounded:
    scale = (weight.abs().amax(1) / 127).clamp(min=LEAST).bfloat16()
    return Rounded((weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale)


def _int4(weight: Tensor) -> Rounded:
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise DraftwellError(f"int4 weights share a scale among {GROUP} inputs, and a layer of this model has {inputs}: choose int8",
                             code="weights_unsupported")
    grouped = weight.view(outputs, -1, GROUP)
    least, most = grouped.aminmax(dim=-1)
    scale = ((most - least) / 15).clamp(min=LEAST).bfloat16()
    zero = (least + 8 * scale.float()).bfloat16()
    whole = ((grouped - zero.float()[..., None]) / scale.float()[..., None] + 8).round().clamp(0, 15).to(torch.uint8)
    low, high = whole.chunk(2, dim=-1)
    return Rounded(low | high << 4, scale, zero)
