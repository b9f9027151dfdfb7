"""Attention of the packed rows of a forward pass by torch, each over its own slot.

The reference of `native/attention.h`, and what runs where there is no library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.models.visible import visible

Placed = tuple[int, int, int]
"""Slot, position of the first token, and number of tokens of a row."""


class RowAttention:
    """Attention of one forward pass.

    Args:
        placed: the rows in the order in which their tokens are packed, each in a slot of its own.
        trees: slot → parents, of the rows that are trees.
    """

    def __init__(
        self,
        slots: Slots,
        placed: Sequence[Placed],
        shape: Architecture,
        trees: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ):
        self.slots, self.placed, self.shape, self.trees = slots, placed, shape, trees

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries `[total, heads, head_dim]`, keys and values `[total, kv_heads, head_dim]` →
        `[total, heads * head_dim]`."""
        shape, found, first = self.shape, [], 0
        for slot, start, count in self.placed:
            own = slice(first, first + count)
            keys, values = self.slots.write(
                layer, slot, start, key[own].transpose(0, 1), value[own].transpose(0, 1)
            )
            window, parents = shape.windows[layer], self.trees.get(slot)
            seen = visible(start, count, window, parents, query.device)
            out = attend(
                query[own].transpose(0, 1), keys, values, seen, shape.scale, shape.attention_softcap
            )
            found.append(out.transpose(0, 1).reshape(count, -1))
            first += count
        return torch.cat(found)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Attention of the tokens of one row.

    Query groups are folded into the query axis, so that keys are never repeated for grouped-query
    attention.

    Args:
        query: `[heads, count, head_dim]`.
        keys, values: `[kv_heads, end, head_dim]`.
        seen: `[count, end]` bool (`visible`); None: each token sees all keys.
        scale: of the scores; None: that of the size of a head.
        softcap: bound of the scores, by tanh.
    Returns:
        `[heads, count, head_dim]`.
    """
    heads, count, dim = query.shape
    groups = heads // keys.shape[0]
    seen = None if seen is None else seen.repeat(groups, 1)
    folded = query.reshape(keys.shape[0], groups * count, dim)
    if not softcap:
        out = F.scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=seen, scale=scale
        )[0]
    else:
        scores = folded @ keys.transpose(1, 2) * (dim**-0.5 if scale is None else scale)
        scores = softcap * torch.tanh(scores / softcap)
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        out = scores.float().softmax(-1).to(query.dtype) @ values
    return out.reshape(heads, count, dim)
