"""Slots whose tensors never change shape: all slots of a layer, branches and a scratch slot among
them, in one tensor.

Which slot a row reads and writes is then data on the device, not an address, and one CUDA graph
serves every slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwell.serving.runtime.failures import room_for
from draftwell.serving.runtime.models.slots import Slots


class StaticSlots(Slots):
    """Slots in one tensor `[slots + 1 + branches, kv_heads, max_context, head_dim]` a layer;
    arguments as for `Slots`.

    What a slot holds of an earlier request is zeroed when it is opened, but for what the next one
    takes over. Masked positions count with weight 0, and 0 · NaN is NaN: what a request that went
    wrong left after must not reach the next one.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        count: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(shapes, count + 1, max_context, dtype, device)
        self.count = self.scratch = count
        self._free = list(range(count))[::-1]

    @property
    def full(self) -> bool:
        """Whether the next branch needs memory that is not there, so that tensors would move."""
        return not self._free_branches and len(self.lengths) == self.keys[0].shape[0]

    def open_branch(self) -> int:
        """Take a slot for a further sequence; where there is none, all tensors move into larger
        ones (see `full`)."""
        if self.full:
            more = len(self.lengths)
            with room_for(
                f"{more} more slots of {self.max_context} positions",
                "draft fewer sequences or start with a shorter context",
            ):
                grown = [
                    [torch.cat([layer, torch.zeros_like(layer)]) for layer in layers]
                    for layers in (self.keys, self.values)
                ]
            self.keys[:], self.values[:] = grown  # both or none
        if not self._free_branches:
            self._free_branches.append(len(self.lengths))
            self.lengths.append(0)
        slot = min(self._free_branches)
        self._free_branches.remove(slot)
        self.lengths[slot] = 0
        self._wipe(slot)
        return slot

    def put(
        self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Write keys and values `[rows, tokens, kv_heads, head_dim]` to `slots` and `positions`,
        both `[rows, tokens]`."""
        self.keys[layer].transpose(1, 2)[slots, positions] = keys
        self.values[layer].transpose(1, 2)[slots, positions] = values

    def take(self, layer: int, slots: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, kv_heads, reach, head_dim]` of the first `reach` positions of
        `slots` `[rows]`."""
        return self.keys[layer][:, :, :reach].index_select(0, slots), self.values[layer][
            :, :, :reach
        ].index_select(0, slots)

    @torch.inference_mode()  # tensors that have grown were made in it
    def _wipe(self, slot: int, start: int = 0) -> None:
        for layer in [*self.keys, *self.values]:
            layer[slot][:, start:].zero_()

    def memory(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer][slot], self.values[layer][slot]
