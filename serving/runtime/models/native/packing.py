"""Weights in the layout that `product.h` reads: blocks of outputs, of which two inputs follow each
other."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.runtime.models.quantised import GROUP, Rounded

EVEN = 32
"""Outputs and inputs are filled up with zeros to a multiple of this."""
PATCHED = 128
"""One number in so many may need a patch: these take a quarter of what 12 bits save."""
ROOM = 1 << 26
"""Bytes that are asked of the system at once, for as many weights as fit."""


class Weight(ctypes.Structure):
    """`Weight` of product.h."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("given", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("patches", ctypes.c_void_p),
        ("first_patch", ctypes.c_void_p),
    ]


def filled(count: int) -> int:
    """The next multiple of `EVEN`.

    >>> filled(576), filled(577)
    (576, 608)
    """
    return -(-count // EVEN) * EVEN


def packed(
    weight: Tensor | Rounded, bias: Tensor | None, library: ctypes.CDLL
) -> tuple[Weight, list[Tensor]]:
    """A weight `[out, in]` as C++ reads it, and the tensors that it points to.

    Args:
        weight: float32 or bfloat16, or rounded to int8 or int4.
        bias: `[out]`.
    """
    lanes = library.draftwell_lanes()
    whole = weight.whole if isinstance(weight, Rounded) else weight
    outputs, inputs = (filled(size) for size in whole.shape)
    scale = None
    if not isinstance(weight, Rounded):
        kind, pack = (0, by_number) if whole.dtype == torch.float32 else (1, in_pairs)
        data = pack(grown(whole, outputs, inputs), lanes)
    elif weight.zero is None:
        kind, data = 2, by_number(grown(whole, outputs, inputs), lanes)
        scale = grown_line(weight.scale, outputs)
    else:
        kind, data = 3, in_groups(weight, outputs, inputs, lanes)
    short = None
    if kind == 1 and library.draftwell_unpacks():
        short = shortened(data, inputs * 2 * lanes, library)
    if short is not None:
        kind, data = 4, short.data
    else:
        data = place(data)
    line = None if bias is None else grown_line(bias, outputs)
    beside = (None, None, None) if short is None else short[1:]
    kept = [one for one in (data, scale, line, *beside) if one is not None]
    sizes = whole.shape[1], inputs, outputs
    return (
        Weight(data.data_ptr(), pointer(scale), pointer(line), *sizes, kind, *map(pointer, beside)),
        kept,
    )


class Short(NamedTuple):
    """bfloat16 in 12 bits, as twelve_bits.h has it.

    Args:
        data: uint8.
        table: `[16]` uint8.
        patches: `[patches, 2]` int64, places and numbers.
        first_patch: `[blocks + 1]` int64.
    """

    data: Tensor
    table: Tensor
    patches: Tensor
    first_patch: Tensor


def shortened(data: Tensor, block: int, library: ctypes.CDLL) -> Short | None:
    """A packed bfloat16 weight in 12 bits a number, to the bit; None where too many of its numbers
    are of uncommon size, as if they were random bits.

    Passes over few tokens wait for the memory, and read a quarter less of it.

    Args:
        block: numbers of a block.
    """
    count = data.numel()
    table = torch.empty(16, dtype=torch.uint8)
    first_patch = torch.empty(count // block + 1, dtype=torch.int64)
    given = data.data_ptr(), count // block, block, table.data_ptr(), first_patch.data_ptr()
    patched = library.draftwell_choose_table(*given)
    if patched * PATCHED > count:
        return None
    short = torch.frombuffer(LARGE_PAGES.take(count * 3 // 2), dtype=torch.uint8)
    patches = torch.empty(patched, 2, dtype=torch.int64)
    library.draftwell_shorten(*given, short.data_ptr(), patches.data_ptr())
    return Short(short, table, patches, first_patch)


class LargePages:
    """Memory in large pages where the system has them: a pass reads all weights, and with pages of
    4 KB looks up where each of them is.

    The system has a room back when nobody holds any of it; the last one, of `ROOM` bytes, stays.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room, self._taken = memoryview(b""), 0

    def take(self, size: int) -> memoryview:
        """So many bytes, at a multiple of 64."""
        if size >= ROOM:
            return new_room(size)
        with self._lock:
            if self._taken + size > len(self._room):
                self._room, self._taken = new_room(ROOM), 0
            start = self._taken
            self._taken += -(-size // 64) * 64
            return self._room[start : start + size]


def new_room(size: int) -> memoryview:
    """Bytes of the system's, private: the system has no large pages for memory that is shared."""
    room = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)
    with suppress(AttributeError, OSError):  # not Linux, or a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(room)


LARGE_PAGES = LargePages()


def place(data: Tensor) -> Tensor:
    """A copy in large pages."""
    copy = torch.frombuffer(LARGE_PAGES.take(data.nbytes), dtype=data.dtype).view(data.shape)
    return copy.copy_(data)


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers are; None for none."""
    return None if tensor is None else tensor.data_ptr()


def grown(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    """`[out, in]` → `[outputs, inputs]`, with zeros."""
    return F.pad(weight.detach(), (0, inputs - weight.shape[1], 0, outputs - weight.shape[0]))


def grown_line(line: Tensor, outputs: int) -> Tensor:
    """`[out]` → `[outputs]` float32, with zeros."""
    return F.pad(line.detach().float(), (0, outputs - len(line))).contiguous()


def in_pairs(weight: Tensor, lanes: int) -> Tensor:
    """`[blocks, pairs, vectors, lanes, 2]`: the two inputs of an output side by side."""
    return weight.view(-1, 2, lanes, weight.shape[1] // 2, 2).permute(0, 3, 1, 2, 4).contiguous()


def by_number(weight: Tensor, lanes: int) -> Tensor:
    """`[blocks, pairs, 2, vectors, lanes]`: the first input of all outputs, then the second."""
    return weight.view(-1, 2, lanes, weight.shape[1] // 2, 2).permute(0, 3, 4, 1, 2).contiguous()


def in_groups(weight: Rounded, outputs: int, inputs: int, lanes: int) -> Tensor:
    """`[blocks, groups, bytes]` of int4: scales and zeros of all outputs, then a byte for each pair
    of inputs of an output."""
    assert weight.zero is not None
    width, groups = 2 * lanes, inputs // GROUP
    whole = grown(weight.whole, outputs, inputs).to(torch.uint8)
    pairs = whole.view(-1, width, groups, GROUP // 2, 2)
    data = (pairs[..., 0] | pairs[..., 1] << 4).permute(0, 2, 3, 1).flatten(2)
    lines = [
        grown(one, outputs, groups).view(-1, width, groups).transpose(1, 2).contiguous()
        for one in (weight.scale, weight.zero)
    ]
    return torch.cat([*(one.view(torch.uint8) for one in lines), data], -1).contiguous()
