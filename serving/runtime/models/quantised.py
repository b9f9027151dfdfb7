"""Weights of fewer bytes.

A weight is rounded once, when it is loaded, and the model is then *that* model: every path,
whatever its dtype and its number of rows, multiplies by the same rounded weight. So a strategy that
is lossless gives what plain decoding with these weights gives; how far that is from the full
weights is measured by the gate (`components/gate/weights_check.py`).

- int8: `whole * scale`, a scale for each output channel, symmetric.
- int4: `(whole - 8) * scale + zero`, a scale and a zero for each `GROUP` inputs of an output
  channel, from their least to their largest weight, as llama.cpp's Q4_1 has them: 5 bits a weight.

Scales and zeros are bfloat16 numbers in every dtype; where two inputs are multiplied at once
(AVX-512 with bfloat16), an int4 weight is rounded to bfloat16 once more.
Embeddings and head keep their weights: rounding a head cost more agreement than time (docs/log.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwell.serving.number_format import Weights

GROUP = 32
"""Inputs that share a scale and a zero in int4."""
LEAST = 1e-8
"""Smallest scale, of a channel or group without any weight (a padded target has those)."""


class Rounded(NamedTuple):
    """A weight `[out, in]` as whole numbers.

    Args:
        whole: int8 `[out, in]`, −127 to 127; of int4 0 to 15.
        scale: bfloat16 `[out]`; of int4 `[out, groups]`.
        zero: bfloat16 `[out, groups]` of int4.
    """

    whole: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def dense(self) -> Tensor:
        """The rounded weight, float32 `[out, in]`."""
        if self.zero is None:
            return self.whole.float() * self.scale.float()[:, None]
        grouped = self.whole.float().view(*self.scale.shape, GROUP)
        return (
            (grouped - 8) * self.scale.float()[..., None] + self.zero.float()[..., None]
        ).flatten(1)


def rounded(weight: Tensor, weights: Weights) -> Rounded:
    """A weight `[out, in]` rounded; to int8 also where its inputs fill no groups of int4."""
    fits = weight.shape[1] % GROUP == 0
    return (
        _int4(weight.detach().float())
        if weights == "int4" and fits
        else _int8(weight.detach().float())
    )


def _int8(weight: Tensor) -> Rounded:
    scale = (weight.abs().amax(1) / 127).clamp(min=LEAST).bfloat16()
    return Rounded((weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale)


def _int4(weight: Tensor) -> Rounded:
    grouped = weight.view(len(weight), -1, GROUP)
    least, most = grouped.aminmax(dim=-1)
    scale = ((most - least) / 15).clamp(min=LEAST).bfloat16()
    zero = (least + 8 * scale.float()).bfloat16()
    whole = (
        ((grouped - zero.float()[..., None]) / scale.float()[..., None] + 8).round().clamp(0, 15)
    )
    return Rounded(whole.to(torch.int8).flatten(1), scale, zero)
