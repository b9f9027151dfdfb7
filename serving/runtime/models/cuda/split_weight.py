"""Weights of products whose sums are cut the same way whatever number of tokens they are for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwell.serving.number_format import Weights

PROGRAMS = 396
"""How many programs shall share a product: three for each of the 132 multiprocessors of an H100 or
H200. A constant, whatever the card: another one would give other sums."""
FEWEST = 3
"""Steps of one program at least: as many are loaded at once."""
OUTPUTS = 64
"""Outputs of one program."""


def step_of(dtype: torch.dtype) -> int:
    """Inputs that a program multiplies at once."""
    return 32 if dtype == torch.float32 else 64


@dataclass(frozen=True, eq=False)
class SplitWeight:
    """A weight `[out, in]` and its bias `[out]`.

    Args:
        splits: pieces of the inputs, summed apart and then in order.
        piece: inputs of each piece but perhaps the last.
    """

    weight: Tensor
    bias: Tensor | None
    splits: int
    piece: int


def split(
    weight: Tensor, bias: Tensor | None = None, weights: Weights | None = None
) -> SplitWeight:
    """A weight and the pieces of its sums, which depend on its shape and dtype alone.

    Args:
        weights: None: rounded weights are read on CPUs only (`pair.check_weights`).
    """
    assert weights is None, weights
    outputs, inputs = weight.shape
    step = step_of(weight.dtype)
    steps = -(-inputs // step)
    wanted = max(1, PROGRAMS // -(-outputs // OUTPUTS))
    piece = max(FEWEST, -(-steps // wanted)) * step
    return SplitWeight(weight.detach().contiguous(), bias, -(-inputs // piece), piece)
