"""Key/value slots: one static tensor a layer, allocated once, shared by all requests of a model.

A slot belongs to one request. Its length says how many positions are valid; rollback lowers it,
nothing is copied. A request that drafts several sequences takes *branch* slots next to its own.
They are made when first asked for and are never given to requests, so that sequences and requests
cannot wait for each other; what exists never moves, because a forward pass of another request may
be writing to it.

A slot that was given back keeps its content until it is taken again: the next request may begin
alike (`slot_texts.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftwell.serving.errors import ContextTooLong, DraftwellError
from draftwell.serving.runtime.failures import room_for
from draftwell.serving.runtime.slot_texts import SlotText, SlotTexts


def pinned(numbers: Any, device: torch.device) -> Tensor:
    """Numbers as a tensor that can be copied to a device without a wait."""
    tensor = torch.as_tensor(numbers)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def sent(numbers: Any, device: torch.device) -> Tensor:
    """Numbers on a device, copied there without a wait."""
    return pinned(numbers, device).to(device, non_blocking=True)


class Slots:
    """Allocation and lengths of slots, and their key/value memory.

    Args:
        shapes: (kv_heads, head_dim) of each layer.
        count: number of requests that can be held at once.
        max_context: positions of a slot.
    Raises:
        OutOfMemory: the device has no room for them.
    """

    spare: ClassVar[int] = 0
    """Slots after those of requests, which are given to nobody."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        count: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.count, self.max_context = count, max_context
        self.lengths = [0] * (count + self.spare)
        self._written = [0] * count
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._branches: list[tuple[list[Tensor], list[Tensor]]] = []
        self._free_branches: list[int] = []
        self._free = list(range(count))[::-1]
        """The one that was given back last comes last."""
        self.texts = SlotTexts()
        self.features: Tensor | None = None
        """`[count, max_context, width]`, hidden states that a head drafts from (`features.py`)."""
        with room_for(
            f"{count} slots of {max_context} positions",
            "start with fewer slots or a shorter context",
        ):
            self.keys, self.values = self._allocate(count + self.spare)
        self._pointers: dict[int, ctypes.Array[ctypes.c_void_p]] = {}
        self._memories: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Of requests' slots: views, since making sixty of them in each forward pass takes a
        hundredth of it."""

    def _allocate(self, slots: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of each layer, `[slots, kv_heads, max_context, head_dim]`."""
        keys, values = (
            [
                torch.zeros(slots, h, self.max_context, d, dtype=self._dtype, device=self._device)
                for h, d in self._shapes
            ]
            for _ in range(2)
        )
        return keys, values

    def keep_features(self, width: int) -> None:
        """Make room for `width` numbers for each position of a request's slot."""
        with room_for(
            f"hidden states of {self.count} slots", "start with fewer slots or a shorter context"
        ):
            self.features = torch.empty(
                self.count + self.spare,
                self.max_context,
                width,
                dtype=self._dtype,
                device=self._device,
            )
        self.texts.forget()  # of what was read before there are none

    def open(self, text: SlotText | None = None, prompt: Sequence[int] = ()) -> int:
        """Take a free slot: the one that begins with most of a prompt, if at least half of what it
        holds is in common; else an empty one, or the one that has been free for longest.

        Args:
            text: begins with the tokens that the slot holds already, as many as its length says,
                and is to be continued; None: whatever it holds is not used.
            prompt: tokens of the request; the last one is always read again, because its row is
                wanted.
        """
        if not self._free:
            raise DraftwellError(
                (
                    f"all {self.count} slots are in use: wait for a request to end or start "
                    "with more slots"
                ),
                code="no_free_slot",
            )
        slot, held = self._choose(text, prompt)
        self._free.remove(slot)
        if text is not None:
            text.tokens = list(prompt[:held])
        self.texts.take(slot, text)
        self.lengths[slot] = held
        self._wipe(slot, held)
        return slot

    def _choose(self, text: SlotText | None, prompt: Sequence[int]) -> tuple[int, int]:
        """A free slot, and how many of the prompt's tokens to go on from.

        Of a slot with less than half in common that part is copied later, where there is another
        slot: so a system prompt that all conversations share costs none of them its slot.
        """
        other = next(
            (slot for slot in reversed(self._free) if slot not in self.texts), self._free[0]
        )
        if text is None or text.owner is None:
            return other, 0
        slot, common = self.texts.longest(text.owner, prompt[:-1], self._free)
        if common and (slot == other or 2 * common >= len(self.texts[slot].tokens)):
            return slot, common
        return other, 0

    def _wipe(self, slot: int, start: int = 0) -> None:
        """Set what an earlier request wrote from `start` on to 0: masked positions count with
        weight 0, and 0 · NaN is NaN."""
        for memory in self.held(slot):
            memory[..., start : self._written[slot], :].zero_()
        self._written[slot] = start

    def open_branch(self) -> int:
        """Take a slot for a further sequence of a request that has a slot already."""
        if not self._free_branches:
            with room_for(
                f"another slot of {self.max_context} positions",
                "draft fewer sequences or start with a shorter context",
            ):
                # empty, not zeros: memory that no sequence ever reaches is then never taken from
                # the machine
                keys, values = (
                    [
                        torch.empty(h, self.max_context, d, dtype=self._dtype, device=self._device)
                        for h, d in self._shapes
                    ]
                    for _ in range(2)
                )
            self._branches.append((keys, values))
            self._free_branches.append(len(self.lengths))
            self.lengths.append(0)
        # neighbours, where it can be: some models run those as one batch
        slot = min(self._free_branches)
        self._free_branches.remove(slot)
        self.lengths[slot] = 0
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back; closing one twice is an error of the caller."""
        free = self._free if slot < self.count else self._free_branches
        if slot in free:
            raise ValueError(f"slot {slot} is not open")
        self.texts.leave(slot, self.lengths[slot])
        free.append(slot)

    def rollback(self, slot: int, length: int) -> None:
        """Keep the first `length` positions of a slot."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(
                f"cannot roll slot {slot} of length {self.lengths[slot]} back to {length}"
            )
        self.lengths[slot] = length

    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        """Make `into` hold what the first `length` positions of `source` hold, and nothing else;
        the first `known` it holds already."""
        if source == into or not 0 <= known <= length <= self.lengths[source]:
            raise ValueError(
                f"cannot fork {length} positions of slot {source} of length "
                f"{self.lengths[source]} into slot {into}"
            )
        if into < self.count:
            # first: a copy may fail half-way
            self._written[into] = max(self._written[into], length)
        for old, new in zip(self.held(source), self.held(into), strict=True):
            new[..., known:length, :] = old[..., known:length, :]
        if into < self.count and self.features is not None:
            if source < self.count:
                self.features[into, known:length] = self.features[source, known:length]
            elif into in self.texts:  # branches have none
                self.texts[into].owner = None
        self.lengths[into] = length

    def keep(self, slot: int, length: int, path: Sequence[int]) -> None:
        """Of a slot whose first `length` positions are followed by a tree keep those, and the
        tokens of one path right after them.

        Args:
            path: places in the tree, ascending.
        """
        end = length + len(path)
        if not 0 <= length <= end <= self.lengths[slot] or any(
            length + place >= self.lengths[slot] for place in path
        ):
            raise ValueError(
                f"slot {slot} of length {self.lengths[slot]} holds no tree with the places "
                f"{list(path)} after {length} tokens"
            )
        # what comes before lies where it shall be
        first = next((at for at, place in enumerate(path) if place != at), len(path))
        if first < len(path):
            source = sent([length + place for place in path[first:]], self._device)
            for memory in self.held(slot):
                memory[..., length + first : end, :] = memory[..., source, :]
            if self.features is not None and slot < self.count:
                self.features[slot, length + first : end] = self.features[slot, source]
        self.lengths[slot] = end

    def reserve(self, slot: int, tokens: int) -> int:
        """Extend a slot by `tokens` positions and return where they start."""
        start = self.lengths[slot]
        if start + tokens > self.max_context:
            raise ContextTooLong(
                f"{start + tokens} tokens do not fit the context of {self.max_context}: "
                "shorten the prompt or max_tokens"
            )
        self.lengths[slot] = start + tokens
        if slot < self.count:
            self._written[slot] = max(self._written[slot], start + tokens)
        return start

    def write(
        self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values `[kv_heads, tokens, head_dim]`; return views of all valid ones
        of the slot."""
        end = start + keys.shape[1]
        all_keys, all_values = self.memory(layer, slot)
        all_keys[:, start:end] = keys
        all_values[:, start:end] = values
        return all_keys[:, :end], all_values[:, :end]

    def held(self, slot: int) -> list[Tensor]:
        """Tensors `[..., max_context, head_dim]` that together are the memory of a slot."""
        return [one for layer in range(len(self._shapes)) for one in self.memory(layer, slot)]

    def memory(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[kv_heads, max_context, head_dim]` of a slot."""
        if slot < self.count:
            if slot not in self._memories:
                self._memories[slot] = [
                    (keys[slot], values[slot])
                    for keys, values in zip(self.keys, self.values, strict=True)
                ]
            return self._memories[slot][layer]
        keys, values = self._branches[slot - self.count]
        return keys[layer], values[layer]

    def pointers(self, slot: int) -> ctypes.Array[ctypes.c_void_p]:
        """Where keys and values of a slot are, of one layer after another, for C++."""
        if slot not in self._pointers:
            places = [
                one.data_ptr()
                for layer in range(len(self._shapes))
                for one in self.memory(layer, slot)
            ]
            self._pointers[slot] = (ctypes.c_void_p * len(places))(*places)
        return self._pointers[slot]
