"""Which text each slot of a model holds, so that a request need not read again what is there
already.

A slot that is given back keeps its keys and values until another request takes it. A request of the
same owner whose prompt begins alike takes that slot and reads the rest; or a part of it is copied
into another slot (`Slots.fork`). Only tokens that a model has really read are listed: a rejected
draft, a tree, or what a head made of its own output is not. Owners never share: how long a prompt
takes would tell one what another had asked.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

COMPARED = 64
"""Tokens that are compared at once."""


@dataclass(eq=False)
class SlotText:
    """What a slot holds.

    Args:
        owner: whose requests may go on from it; None: it is not kept, and nobody does.
        tokens: ids of its first positions, as far as they are known.
    """

    owner: Hashable = None
    tokens: list[int] = field(default_factory=list)

    def extend(self, at: int, tokens: Iterable[int]) -> None:
        """The slot has read these from position `at` on; they count only where all before them are
        known."""
        if self.owner is not None and at == len(self.tokens):
            self.tokens += tokens

    def cut(self, length: int) -> None:
        """The slot holds no more than its first `length` positions."""
        del self.tokens[length:]

    def follow(self, other: SlotText, length: int) -> None:
        """The slot holds the first `length` positions of another one."""
        self.tokens[:] = other.tokens[:length]


class SlotTexts:
    """The texts of a model's slots: of those in use, and of free ones as long as they hold
    something."""

    def __init__(self) -> None:
        self._texts: dict[int, SlotText] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._texts

    def __getitem__(self, slot: int) -> SlotText:
        return self._texts[slot]

    def take(self, slot: int, text: SlotText | None) -> None:
        """A request takes the slot; `text` is what it tells of it from now on."""
        self._texts.pop(slot, None)
        if text is not None:
            self._texts[slot] = text

    def leave(self, slot: int, length: int) -> None:
        """A request gives back the slot, which holds `length` positions."""
        text = self._texts.get(slot)
        if text is not None:
            text.cut(length)
            if text.owner is None or not text.tokens:
                del self._texts[slot]

    def forget(self) -> None:
        """Nothing that any slot holds may be taken over: it lacks something that is read from now
        on."""
        for text in self._texts.values():
            text.owner = None

    def longest(
        self, owner: Hashable, tokens: Sequence[int], among: Iterable[int] | None = None
    ) -> tuple[int, int]:
        """The slot of an owner that begins with most of `tokens`, and how many these are; (−1, 0):
        there is none.

        Args:
            among: slots to look at; None: all.
        """
        found = (-1, 0)
        for slot in self._texts if among is None else among:
            text = self._texts.get(slot)
            if text is not None and owner is not None and text.owner == owner:
                common = common_prefix(text.tokens, tokens)
                if common > found[1]:
                    found = slot, common
        return found


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike.

    >>> common_prefix([5, 6, 7], [5, 6, 8, 9]), common_prefix([], [1])
    (2, 0)
    """
    most = min(len(one), len(other))
    at = 0
    while at < most and list(one[at : at + COMPARED]) == list(other[at : at + COMPARED]):
        at += COMPARED
    return next(
        (i for i in range(at, min(at + COMPARED, most)) if one[i] != other[i]),
        min(at + COMPARED, most),
    )
