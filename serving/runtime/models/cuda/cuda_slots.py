"""Slots whose tensors never change shape: those of all layers, branches and a scratch slot among
them, are one tensor.

Which slot a row reads and writes is then data on the device, not an address: one CUDA graph serves
every slot, and what is done to a slot is one operation for all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwell.serving.runtime.failures import room_for
from draftwell.serving.runtime.models.slots import Slots


class CudaSlots(Slots):
    """Slots in one tensor `[2, layers, slots + 1 + branches, kv_heads, max_context, head_dim]`, of
    keys and of values; arguments as for `Slots`.

    What a slot holds of an earlier request is zeroed when it is opened, but for what the next one
    takes over. Masked positions count with weight 0, and 0 · NaN is NaN: what a request that went
    wrong left after must not reach the next one.
    """

    spare = 1

    @property
    def scratch(self) -> int:
        """The slot that padding writes to."""
        return self.count

    def _allocate(self, slots: int) -> tuple[list[Tensor], list[Tensor]]:
        (shape,) = set(self._shapes)
        size = (2, len(self._shapes), slots, shape[0], self.max_context, shape[1])
        return self._take(torch.zeros(size, dtype=self._dtype, device=self._device))

    def _take(self, whole: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        self.whole = whole
        return list(whole[0]), list(whole[1])

    @property
    def full(self) -> bool:
        """Whether the next branch needs memory that is not there, so that tensors would move."""
        return not self._free_branches and len(self.lengths) == self.whole.shape[2]

    def open_branch(self) -> int:
        """Take a slot for a further sequence; where there is none, all tensors move into larger
        ones (see `full`)."""
        if self.full:
            more = len(self.lengths)
            with room_for(
                f"{more} more slots of {self.max_context} positions",
                "draft fewer sequences or start with a shorter context",
            ):
                self.keys, self.values = self._take(
                    torch.cat([self.whole, torch.zeros_like(self.whole)], 2)
                )
        if not self._free_branches:
            self._free_branches.append(len(self.lengths))
            self.lengths.append(0)
        slot = min(self._free_branches)
        self._free_branches.remove(slot)
        self.lengths[slot] = 0
        self._wipe(slot)
        return slot

    @torch.inference_mode()  # tensors that have grown were made in it
    def _wipe(self, slot: int, start: int = 0) -> None:
        for memory in self.held(slot):
            memory[..., start:, :].zero_()

    def held(self, slot: int) -> list[Tensor]:
        return [self.whole[:, :, slot]]

    def memory(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer][slot], self.values[layer][slot]
