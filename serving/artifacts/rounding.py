"""Matrices in 8 bits on disk: int8 with one float32 scale a row, beside them as `<name>.scale`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per output channel: `[out, in]` → int8 `[out, in]` and float32 scales
    `[out]`."""
    scale = weight.float().abs().amax(1).clamp(min=1e-8) / 127
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def rounded(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state with its matrices in 8 bits; vectors as they are."""
    tensors = dict(state)
    for name, tensor in state.items():
        if tensor.dim() == 2:
            tensors[name], tensors[f"{name}.scale"] = quantise(tensor)
    return tensors


def restored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of `rounded` in float32; what was not rounded as it is."""
    # a norm may be called "scale" too
    scales = {f"{n}.scale" for n, tensor in tensors.items() if tensor.dtype == torch.int8}
    return {
        name: tensor.float() * tensors[f"{name}.scale"][:, None]
        if tensor.dtype == torch.int8
        else tensor
        for name, tensor in tensors.items()
        if name not in scales
    }
