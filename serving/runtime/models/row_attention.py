"""Attention of the packed rows of a forward pass, each over its own slot.

Rows of a few tokens (a step of decoding, a draft to verify) attend in one call a layer, whatever
their number: their slots are read where they lie, as one strided tensor. A long row (a part of a
prompt) attends by itself. What does not differ between layers, indices and masks, is made once a
forward pass. Query groups are folded into the query axis of short rows, so that keys are never
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.models.visible import visible

LONGEST_STEP = 32
"""Tokens of a row that counts as short."""
LONGEST_FOLDED = 128
"""Tokens up to which folding the queries of a row that attends by itself pays: torch's kernel took
a tenth to a fifth less time for 48 to 128 tokens, and as much for 256."""
MOST_WASTED = 2048
"""Positions that the queries of a batch may attend over in vain: about what another batch costs, by
an estimate (.07 µs each, .15 ms). Eleven tokens after 1,900 and fifteen after 50, beside seven rows
of one, took 88 ms as one batch and 59 each by itself."""
LONGEST_BY_KERNEL = 64
"""Tokens of a row up to which our kernel takes less time than torch's: .75 to .86 of it for 8 to 32
tokens, .83 to .97 for 64 (nine heads of 64 after 300 to 4,000 tokens, two cores of an AMD EPYC with
AVX-512)."""
MOST_KEPT = 16 << 20
"""Bytes that the kernel keeps between its chunks at most: beyond, they would be mapped and cleared
again in every layer."""
KERNEL_CHUNK = 128
"""Positions of a chunk of the kernel (kernels/row_attention.cpp)."""
BETWEEN = 8
"""Rows of a batch for each slot between theirs that is attended over in vain; where there are more
such slots, copying takes less time (docs/log.md)."""
Placed = tuple[int, int, int]
"""Slot, position of the first token, and number of tokens of a row."""


class Part(Protocol):
    """Rows that attend together."""

    @property
    def tokens(self) -> slice | Tensor:
        """Their places among the packed tokens."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `RowAttention`, for the tokens of this part alone."""


class CompiledParts(NamedTuple):
    """Makers of parts that libraries compute (`compiled_step`).

    Args:
        rows: takes rows of one token in slots of requests, each with the place of its token among
            the packed ones.
        row: takes the place of a row's first token, the row, and its parents where it is a tree;
            None: there is none.
    """

    rows: Callable[[Sequence[tuple[int, Placed]]], Part]
    row: Callable[[int, Placed, Sequence[int] | None], Part] | None


class RowAttention:
    """Attention of one forward pass.

    Args:
        placed: the rows in the order in which their tokens are packed, each in a slot of its own.
        compiled: parts by libraries, where there are any.
        trees: slot → parents, of the rows that are trees.
    """

    def __init__(
        self,
        slots: Slots,
        placed: Sequence[Placed],
        shape: Architecture,
        compiled: CompiledParts | None = None,
        trees: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ):
        ends = [sum(count for _, _, count in placed[: i + 1]) for i in range(len(placed))]
        rows = [(end - row[2], row) for end, row in zip(ends, placed, strict=True)]
        short = [(at, row) for at, row in rows if row[2] <= LONGEST_STEP and row[0] < slots.count]
        # rows of one token by themselves: the last tokens of a prompt would have every one of them
        # padded to as many
        batches = [
            batch
            for alike in (
                [one for one in short if one[1][2] == 1],
                [one for one in short if one[1][2] > 1],
            )
            for batch in by_length(alike)
            if len(batch) > 1
        ]
        self.parts: list[Part] = [
            compiled.rows(batch)
            if compiled and batch[0][1][2] == 1
            else ManyRows(slots, batch, shape, trees)
            for batch in batches
        ]
        for at, row in rows:
            if not any((at, row) in batch for batch in batches):
                make = compiled.row if compiled and by_kernel(row, shape) else None
                parents = trees.get(row[0])
                self.parts.append(
                    make(at, row, parents) if make else OneRow(slots, at, row, shape, parents)
                )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries `[total, heads, head_dim]`, keys and values `[total, kv_heads, head_dim]` →
        `[total, heads * head_dim]`."""
        if len(self.parts) == 1:
            return self.parts[0].attend(layer, query, key, value)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for part in self.parts:
            out[part.tokens] = part.attend(
                layer, query[part.tokens], key[part.tokens], value[part.tokens]
            )
        return out


def by_kernel(row: Placed, shape: Architecture) -> bool:
    """Whether a row that attends by itself does so by our kernel, where there is one."""
    _, start, count = row
    chunks = -(-(start + count) // KERNEL_CHUNK)
    return (
        1 < count <= LONGEST_BY_KERNEL
        and 4 * chunks * count * shape.heads * (shape.head_dim + 2) <= MOST_KEPT
    )


def wasted(rows: Sequence[tuple[int, Placed]]) -> int:
    """Positions that the queries of a batch attend over in vain: every row has as many queries,
    over as many positions, as the longest.

    >>> wasted([(0, (0, 90, 1)), (1, (1, 100, 1))]), wasted([(0, (0, 90, 10)), (10, (1, 1, 5))])
    (10, 970)
    """
    placed = [row for _, row in rows]
    positions = max(start + count for _, start, count in placed)
    queries = max(count for _, _, count in placed)
    return len(placed) * positions * queries - sum(
        (start + count) * count for _, start, count in placed
    )


def by_length(rows: Sequence[tuple[int, Placed]]) -> list[list[tuple[int, Placed]]]:
    """Rows in batches whose texts are not too different in length; each batch in the order of
    `rows`.

    >>> rows = [(0, (0, 90, 1)), (1, (1, 4000, 1)), (2, (2, 110, 1))]
    >>> [[slot for _, (slot, _, _) in batch] for batch in by_length(rows)]
    [[0, 2], [1]]
    """
    batches: list[list[tuple[int, Placed]]] = []
    for one in sorted(rows, key=lambda row: row[1][1] + row[1][2]):
        if not batches or wasted([*batches[-1], one]) > MOST_WASTED:
            batches.append([])
        batches[-1].append(one)
    return [sorted(batch) for batch in batches]


class OneRow:
    """A row by itself: one that is long, alone, or in a branch slot."""

    def __init__(
        self,
        slots: Slots,
        at: int,
        row: Placed,
        shape: Architecture,
        parents: Sequence[int] | None = None,
    ):
        self.slots, self.shape, self.parents = slots, shape, parents
        self.slot, self.start, self.count = row
        self.tokens = slice(at, at + self.count)
        self.folds = self.count <= LONGEST_FOLDED
        self.masks = {window: self._mask(window, slots.keys[0]) for window in set(shape.windows)}

    def _mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """Additive mask over `[count, end]`, of folded queries `[groups * count, end]`; None where
        all is visible or plainly causal."""
        end = self.start + self.count
        if (window is None or end <= window) and (self.count == 1 or self.is_causal(window)):
            return None
        mask = additive(visible(self.start, self.count, window, self.parents, like.device), like)
        return mask.repeat(self.shape.groups, 1) if self.folds else mask

    def is_causal(self, window: int | None) -> bool:
        """Whether the kernel's own causal order will do: the start of a text, short of the
        window."""
        return (
            not self.folds
            and self.parents is None
            and self.start == 0
            and (window is None or self.count <= window)
            and not self.shape.attention_softcap
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape, window = self.shape, self.shape.windows[layer]
        keys, values = self.slots.write(
            layer, self.slot, self.start, key.transpose(0, 1), value.transpose(0, 1)
        )
        mask = self.masks[window]
        if self.folds:
            folded = query.transpose(0, 1).reshape(1, shape.kv_heads, -1, shape.head_dim)
            out = weigh(folded, keys[None], values[None], mask, shape)
        # key heads as the batch, their query heads as heads: keys are shared by a stride of 0
        else:
            heads = query.transpose(0, 1).reshape(shape.kv_heads, shape.groups, -1, shape.head_dim)
            keys, values = (
                memory[:, None].expand(-1, shape.groups, -1, -1) for memory in (keys, values)
            )
            out = weigh(heads, keys, values, mask, shape, causal=self.is_causal(window))
        return (
            out.reshape(shape.heads, self.count, shape.head_dim)
            .transpose(0, 1)
            .reshape(self.count, -1)
        )


class ManyRows:
    """Short rows in slots of requests, as one batch; a shorter row is padded with queries that
    nobody reads.

    Slots side by side, or with few between them, are attended over in place, those between too;
    others are copied together.
    """

    def __init__(
        self,
        slots: Slots,
        rows: Sequence[tuple[int, Placed]],
        shape: Architecture,
        trees: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ):
        device = slots.keys[0].device
        self.slots, self.shape = slots, shape
        rows = sorted(rows, key=lambda row: row[1][0])
        taken = [slot for _, (slot, _, _) in rows]
        self.first, self.last = taken[0], taken[-1]
        self.in_place = (self.last - self.first + 1 - len(rows)) * BETWEEN <= len(rows)
        self.batch = self.last - self.first + 1 if self.in_place else len(rows)
        self.count = max(count for _, (_, _, count) in rows)
        self.end = max(start + count for _, (_, start, count) in rows)
        line = [slot - self.first for slot in taken] if self.in_place else list(range(len(rows)))
        where = sorted(
            (at + j, number * self.count + j, slot, start + j)
            for number, (at, (slot, start, count)) in zip(line, rows, strict=True)
            for j in range(count)
        )
        self.tokens, self.padded, self.slot_ids, self.positions = torch.tensor(
            where, device=device
        ).unbind(1)
        self.full = [one[1] for one in where] == list(range(self.batch * self.count))
        self.taken = torch.tensor(taken, device=device)
        alternatives = [
            (number, row) for number, (_, row) in zip(line, rows, strict=True) if row[0] in trees
        ]
        self.masks = {
            window: additive(self._seen(window, alternatives, trees), slots.keys[0])[
                :, None
            ].repeat(1, 1, shape.groups, 1)
            for window in set(shape.windows)
        }

    def _seen(
        self,
        window: int | None,
        alternatives: Sequence[tuple[int, Placed]],
        trees: Mapping[int, Sequence[int]],
    ) -> Tensor:
        """`[batch, count, end]` bool: what each query sees.

        Args:
            alternatives: the rows that are trees, with their places in the batch.
        """
        device = self.positions.device
        # padding sees position 0: no empty softmax
        last = torch.zeros(self.batch * self.count, dtype=torch.long, device=device)
        last[self.padded] = self.positions
        ahead = last[:, None] - torch.arange(self.end, device=device)
        seen = (ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)).view(
            self.batch, self.count, self.end
        )
        for number, (slot, start, count) in alternatives:
            seen[number, :count] = False
            seen[number, :count, : start + count] = visible(
                start, count, window, trees[slot], device
            )
        return seen

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape = self.shape
        memories = self.slots.keys[layer], self.slots.values[layer]
        for memory, new in zip(memories, (key, value), strict=True):
            memory.transpose(1, 2)[self.slot_ids, self.positions] = new
        keys, values = (
            memory[self.first : self.last + 1, :, : self.end]
            if self.in_place
            else memory[:, :, : self.end].index_select(0, self.taken)
            for memory in memories
        )
        if not self.full:
            query = query.new_zeros(
                self.batch * self.count, shape.heads, shape.head_dim
            ).index_copy_(0, self.padded, query)
        lined = query.view(self.batch, self.count, shape.heads, shape.head_dim).transpose(1, 2)
        folded = lined.reshape(self.batch, shape.kv_heads, -1, shape.head_dim)
        out = weigh(folded, keys, values, self.masks[shape.windows[layer]], shape)
        out = (
            out.reshape(self.batch, shape.heads, self.count, shape.head_dim)
            .transpose(1, 2)
            .reshape(self.batch * self.count, -1)
        )
        return out if self.full else out[self.padded]


def additive(seen: Tensor, like: Tensor) -> Tensor:
    """A mask of `like`'s dtype: 0 where a query sees (`visible`), -inf where it must not."""
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
        ~seen, float("-inf")
    )


def weigh(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    shape: Architecture,
    *,
    causal: bool = False,
) -> Tensor:
    """Attention of `query` `[batch, heads, queries, head_dim]` over `keys` and `values` `[batch,
    heads, positions, head_dim]`."""
    if shape.attention_softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=shape.scale
        )
    scores = shape.attention_softcap * torch.tanh(
        query @ keys.transpose(2, 3) * shape.scale / shape.attention_softcap
    )
    if mask is not None:
        scores = scores + mask
    return scores.float().softmax(-1).to(query.dtype) @ values
