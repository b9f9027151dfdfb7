"""Key/value slots: one static tensor a layer, allocated once, shared by all requests of a model.

A slot belongs to one request. Its length says how many positions are valid; rollback lowers it, nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serving.runtime.failures import room_for
from serving.runtime.types import ContextTooLong, DraftwellError


class Slots:
    """Allocation and lengths of slots, and their key/value memory.

    Args:
        shapes: (kv_heads, head_dim) of each layer.
        count: number of requests that can be held at once.
        max_context: positions of a slot.
    Raises:
        OutOfMemory: the device has no room for them.
    """

    def __init__(self, shapes: list[tuple[int, int]], count: int, max_context: int, dtype: torch.dtype, device: torch.device):
        self.max_context = max_context
        self.lengths = [0] * count
        self._free = list(range(count))[::-1]
        with room_for(f"{count} slots of {max_context} positions", "start with fewer slots or a shorter context"):
            self.keys = [torch.zeros(count, h, max_context, d, dtype=dtype, device=device) for h, d in shapes]
            self.values = [torch.zeros(count, h, max_context, d, dtype=dtype, device=device) for h, d in shapes]

    def open(self) -> int:
        """Take a free slot."""
        if not self._free:
            raise DraftwellError(f"all {len(self.lengths)} slots are in use: wait for a request to end or start with more slots")
        slot = self._free.pop()
        self.lengths[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back; closing one twice is an error of the caller."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is not open")
        self._free.append(slot)

    def rollback(self, slot: int, length: int) -> None:
        """Keep the first `length` positions of a slot."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot roll slot {slot} of length {self.lengths[slot]} back to {length}")
        self.lengths[slot] = length

    def reserve(self, slot: int, tokens: int) -> int:
        """Extend a slot by `tokens` positions and return where they start."""
        start = self.lengths[slot]
        if start + tokens > self.max_context:
            raise ContextTooLong(f"{start + tokens} tokens do not fit the context of {self.max_context}: shorten the prompt or max_tokens")
        self.lengths[slot] = start + tokens
        return start

    def write(self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values `[kv_heads, tokens, head_dim]`; return views of all valid ones of the slot."""
        end = start + keys.shape[1]
        self.keys[layer][slot, :, start:end] = keys
        self.values[layer][slot, :, start:end] = values
        return self.keys[layer][slot, :, :end], self.values[layer][slot, :, :end]
