"""Hidden states of a target that a head drafts from (EAGLE-3, 2503.01840, section 3.1): kept for
each position of a request's slot.

They are stored where keys and values are, so that prompts read in pieces, rejected drafts and trees
need nothing of their own here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwell.serving.runtime.models.slots import Slots


class Entered:
    """States that enter chosen layers in one forward pass.

    Args:
        layers: their numbers, ascending.
        rows: slot, position of the first token, and number of tokens of the packed rows.
    """

    def __init__(self, layers: Sequence[int], rows: Sequence[tuple[int, int, int]]):
        self._layers, self._rows = tuple(layers), rows
        self._states: list[Tensor] = []

    def enter(self, layer: int, x: Tensor) -> None:
        """States `[n, hidden]` before a layer."""
        self._states += [x] * self._layers.count(layer)

    def enter_all(self, joined: Tensor) -> None:
        """States `[n, layers * hidden]` before all of the layers."""
        self._states = [joined]

    def store(self, slots: Slots) -> None:
        """Write them into the slots; branches keep none."""
        assert slots.features is not None
        joined, at = torch.cat(self._states, -1), 0
        for slot, start, count in self._rows:
            if slot < slots.count:
                slots.features[slot, start : start + count] = joined[at : at + count]
            at += count
