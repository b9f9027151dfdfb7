"""One pass as numbers: what the device has to know of tokens, rows and trees, in one int32 tensor
`[FIELDS, tokens]` that is copied once.

Its shape, the *bucket*, is a count of tokens alone, so that six CUDA graphs serve all passes; which
slots, positions, trees and rows there are is data. A tree's token sees its path by depth: the key
of position p ≥ `START` is stored in place `START` + `PATHS`[p − `START`]. So it finds at every
position what it would find there alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.row_attention import Placed
from draftwell.serving.runtime.trees import ROOT, depths

Fields = NDArray[np.int32]
ORDER = range(10)
ID, SLOT, POSITION, PLACE, START, KEPT, FIRST, SHARING, LIVE, PATHS = ORDER
"""Of each token: its id, its slot, its position, the place there where its key is stored, and the
position from which it sees keys by its path. `KEPT`: tokens whose logits are wanted. `FIRST`,
`SHARING`: first token and number of tokens of each tile, which sees the same keys. `LIVE`: two
numbers, how many tokens and how many kept ones there are; all others are padding."""
DEPTH = 64
"""Levels of a tree."""
FIELDS = PATHS + DEPTH
NEVER = 1 << 30
"""`START` of a token that is in no tree."""
SMALLEST = 16
"""Tokens of the smallest bucket, for which a product takes as long as for one."""


def bucket(tokens: int) -> int:
    """The shape for so many tokens.

    >>> [bucket(n) for n in (1, 16, 17, 300)]
    [16, 16, 32, 512]
    """
    return max(SMALLEST, 1 << (tokens - 1).bit_length())


def pack(rows: Sequence[Forward], placed: Sequence[Placed]) -> tuple[Fields, Fields]:
    """Fields of the tokens of all rows one after another, and which of them are kept, `[kept]`."""
    ids: list[int] = []
    slots: list[int] = []
    places: list[int] = []
    kept: list[int] = []
    for row, (slot, start, count) in zip(rows, placed, strict=True):
        ids += row.tokens
        slots += [slot] * count
        places += range(start, start + count)
        kept += range(len(ids) - row.keep, len(ids))
    fields = np.zeros((FIELDS, len(ids)), np.int32)
    fields[ID], fields[SLOT], fields[START] = ids, slots, NEVER
    fields[PLACE] = fields[POSITION] = places
    at = 0
    for row, (_, start, count) in zip(rows, placed, strict=True):
        if row.parents is not None:
            _pack_tree(fields[:, at : at + count], start, row.parents)
        at += count
    return fields, np.array(kept, np.int32)


def _pack_tree(own: Fields, start: int, parents: Sequence[int]) -> None:
    """Positions and paths of a row that is a tree after `start` tokens of its slot.

    What all its tokens follow, such as text that was not read yet, is no part of the tree.
    """
    count = len(parents)
    run = next((i for i, parent in enumerate(parents) if parent != i - 1), count)
    trunk = min([run, *(parent + 1 for parent in parents[run:])])
    if trunk == count:
        return
    levels = depths(parents)
    if max(levels) - trunk > DEPTH:
        raise DraftwellError(
            f"a draft tree of {max(levels) - trunk} levels is too deep for CUDA graphs: draft at "
            f"most {DEPTH}",
            code="tree_too_deep",
        )
    own[START, trunk:] = start + trunk
    own[POSITION] = np.array(levels) + start - 1
    for i in range(trunk, count):
        parent = parents[i]
        if parent != ROOT and parent >= trunk:
            own[PATHS:, i] = own[PATHS:, parent]
        own[PATHS + levels[i] - trunk - 1, i] = i - trunk


def passes(
    fields: Fields, kept: Fields, most: int, sharing: int, scratch: int
) -> Iterator[tuple[Fields, int]]:
    """Packed tokens cut into passes of at most `most` tokens, each filled up to its bucket, and how
    many tokens each keeps.

    A row may be cut anywhere: what is before a token is in its slot by then.

    Args:
        sharing: tokens of a tile at most.
        scratch: slot of padding.
    """
    for at in range(0, fields.shape[1], most):
        part, own = fields[:, at : at + most], kept[(kept >= at) & (kept < at + most)] - at
        count = part.shape[1]
        packed = padding(bucket(count), scratch)
        packed[:, :count] = part
        firsts = _tiles(part, sharing)
        packed[FIRST, : len(firsts)] = firsts
        packed[SHARING, : len(firsts)] = np.diff(firsts, append=count)
        packed[KEPT, : len(own)] = own
        packed[LIVE, :2] = count, len(own)
        yield packed, len(own)


def padding(tokens: int, scratch: int) -> Fields:
    """A pass of no token."""
    packed = np.zeros((FIELDS, tokens), np.int32)
    packed[SLOT], packed[START] = scratch, NEVER
    return packed


def _tiles(fields: Fields, sharing: int) -> NDArray[np.intp]:
    """First token of each tile: a tree's tokens are alone, those of a slot share its keys."""
    numbers = np.arange(fields.shape[1])
    alone = fields[START] != NEVER
    begins = alone | (np.diff(fields[SLOT], prepend=-1) != 0)
    begin = np.maximum.accumulate(np.where(begins, numbers, 0))
    return np.flatnonzero((numbers - begin) % sharing == 0)
