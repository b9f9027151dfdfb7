"""Backs what a model reads in every forward with huge pages.

A forward over one token streams through all weights. In 4 kB pages that is one address translation for every 2,048
bfloat16 numbers, and inside a virtual machine a translation walks two page tables: there, reading the weights took up to
four times as long as the memory needs (docs/log.md). Linux gives huge pages by itself only where it was set up to
("always"), else where a process asks (madvise(2)); a process that asks after it has loaded its weights gets them at once
(MADV_COLLAPSE, Linux 6.1). Elsewhere this does nothing.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
MAPS = Path("/proc/self/maps")


def private_memory(maps: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of whole huge pages in this process's private writable memory that backs no file.

    >>> list(private_memory("7f0000100000-7f0000900000 rw-p 00000000 00:00 0 \\n7f0001000000-7f0002000000 r--p 0 08:01 7 /lib/x.so"))
    [(139637978824704, 139637985116160)]
    """
    for line in maps.splitlines():
        span, rights, *_, inode, name = [*line.split(maxsplit=5), ""][:6]
        if not rights.startswith("rw-p") or inode != "0" or name.strip() not in ("", "[heap]"):
            continue
        first, last = (int(address, 16) for address in span.split("-"))
        start, end = -(-first // HUGE_PAGE) * HUGE_PAGE, last // HUGE_PAGE * HUGE_PAGE
        if start < end:
            yield start, end


def use_huge_pages() -> int:
    """Ask for huge pages under all memory that this process holds now; returns the bytes that have them, 0 where there are none.

    Takes about a second for a gigabyte, once; call it when all models are loaded.
    """
    if sys.platform != "linux" or not MAPS.is_file():
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    backed = 0
    for start, end in private_memory(MAPS.read_text()):
        # An address that was unmapped meanwhile, or a kernel without the advice, refuses: nothing is lost but speed.
        if advise(start, end - start, MADV_HUGEPAGE) == 0 and advise(start, end - start, MADV_COLLAPSE) == 0:
            backed += end - start
    return backed
