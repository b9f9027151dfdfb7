"""Candidates beside those that a head covers: the tokens of a slot's own text.

A head of 8,192 tokens misses most names, and a text's names are those of its prompt. The rows of the output embedding are the target's,
so that further ones can stand beside them without any training.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class SeenTokens:
    """What each slot has read that the head does not cover.

    Args:
        covered: `[head]` ids of the head's tokens, ascending.
        rows: `[vocab, hidden]`, the target's output embedding.
    """

    def __init__(self, covered: Tensor, rows: Tensor):
        self.covered, self.rows = covered, rows
        self._covered = frozenset(covered.tolist())
        self._seen: dict[int, dict[int, None]] = {}
        self._columns: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def clear(self, slot: int) -> None:
        """Another request begins."""
        self._seen.pop(slot, None)
        self._columns.pop(slot, None)

    def copy(self, source: int, into: int) -> None:
        """A branch begins with what its slot has."""
        self.clear(into)
        self.read(into, self._seen.get(source, ()))

    def read(self, slot: int, tokens: Iterable[int]) -> None:
        """Take up tokens of a slot's text."""
        seen = self._seen.setdefault(slot, {})
        count = len(seen)
        seen.update(dict.fromkeys(token for token in tokens if token not in self._covered))
        if len(seen) > count:
            self._columns.pop(slot, None)

    def widened(self, slot: int, logits: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """A slot's logits with columns for its own tokens, and the ids of all columns, ascending.

        Args:
            logits: `[keep, head]`.
            states: `[keep, hidden]`, what the logits were made from.
        """
        seen = self._seen.get(slot)
        if not seen:
            return logits, self.covered
        if slot not in self._columns:
            own = torch.tensor(list(seen), device=self.covered.device)
            support, order = torch.cat([self.covered, own]).sort()
            self._columns[slot] = self.rows[own].to(states.dtype).T.contiguous(), order, support
        rows, order, support = self._columns[slot]
        return torch.cat([logits, (states @ rows).float()], -1)[:, order], support
