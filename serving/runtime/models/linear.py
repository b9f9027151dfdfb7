"""Products with a fixed weight, by torch; by the library they are `native.decoder.Product`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.number_format import Weights
from draftwell.serving.runtime.models.quantised import rounded

Linear = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""A weight `[out, in]` and its bias `[out]` → their product."""


def linear(weight: Tensor, bias: Tensor | None = None, weights: Weights | None = None) -> Linear:
    """x `[rows, in]` → `x @ weight.T + bias` for a weight `[out, in]`.

    Args:
        weights: what the weight is rounded to first.
    """
    weight = weight.detach().contiguous()
    if weights is not None:
        weight = rounded(weight, weights).dense().to(weight.dtype)
    return partial(F.linear, weight=weight, bias=bias)
