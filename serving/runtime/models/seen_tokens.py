"""Candidates beside those that a head covers: the tokens of a slot's own text.

A head of 8,192 tokens misses most names, and a text's names are those of its prompt. The rows of
the output embedding are the target's, so that further ones can stand beside them without any
training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor


class SeenTokens:
    """What each slot has read that the head does not cover.

    Args:
        covered: `[head]` ids of the head's tokens, ascending.
        rows: `[vocab, hidden]`, the target's output embedding; None where the head has another one:
            then there are no further candidates.
        dots: two tensors `[n, hidden]` and `[m, hidden]` float32 → their dot products `[n, m]`.
    """

    def __init__(
        self,
        covered: Tensor,
        rows: Tensor | None,
        dots: Callable[[Tensor, Tensor], Tensor] = lambda x, rows: x @ rows.T,
    ):
        self.covered, self.rows, self._dots = covered, rows, dots
        self._covered = frozenset(covered.tolist())
        self._seen: dict[int, dict[int, None]] = {}
        self._columns: dict[int, Columns] = {}

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
        self._seen.setdefault(slot, {}).update(
            dict.fromkeys(token for token in tokens if token not in self._covered)
        )

    def widened(self, slot: int, logits: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """A slot's logits with columns for its own tokens, and the ids of all columns, ascending.

        Args:
            logits: `[keep, head]`.
            states: `[keep, hidden]`, what the logits were made from.
        """
        seen = self._seen.get(slot)
        if not seen or self.rows is None:
            return logits, self.covered
        columns = self._columns.get(slot)
        if columns is None:
            columns = self._columns[slot] = Columns(self.covered)
        if columns.count < len(seen):
            columns.extend(sorted(islice(seen, columns.count, None)), self.rows)
        own = self._dots(states.float(), columns.rows[: columns.count])
        return torch.cat([logits, own], -1).index_select(-1, columns.order), columns.support


class Columns:
    """The columns of a slot whose text continues: what a step adds to them does not grow with the
    text.

    Attributes:
        count: the slot's own tokens.
        rows: `[count or more, hidden]`, their rows of the output embedding.
        support: `[head + count]` ids of all columns, ascending.
        order: `[head + count]` where each of these is among the head's columns with the slot's own
            after them.
    """

    def __init__(self, covered: Tensor):
        self.count, self.rows = 0, torch.empty(0)
        self.support, self.order = covered, torch.arange(len(covered), device=covered.device)

    def extend(self, tokens: Sequence[int], rows: Tensor) -> None:
        """Put in further tokens, ascending, none of which has a column.

        Args:
            rows: `[vocab, hidden]`, of which theirs are kept, in float32: on CPUs a product of so
                few in bfloat16 takes thrice as long.
        """
        device, known, total = self.support.device, len(self.support), self.count + len(tokens)
        new = torch.tensor(tokens, device=device)
        if total > len(self.rows):  # twice as many, so that most steps copy nothing
            larger = torch.empty(2 * total, rows.shape[1], device=rows.device)
            if self.count:
                larger[: self.count] = self.rows[: self.count]
            self.rows = larger
        self.rows[self.count : total] = rows[new]
        columns = torch.arange(known + len(tokens), device=device)
        places = torch.cat(
            [
                columns[:known] + torch.searchsorted(new, self.support),
                columns[: len(tokens)] + torch.searchsorted(self.support, new),
            ]
        )
        self.support, self.order = (
            torch.empty_like(places).index_copy_(0, places, torch.cat(both))
            for both in ((self.support, new), (self.order, columns[known:]))
        )
        self.count = total
