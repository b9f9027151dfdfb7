"""Huge pages are asked for under the process's own memory, and under nothing else."""

from __future__ import annotations

import sys

import pytest
import torch

from serving.runtime import huge_pages
from serving.runtime.huge_pages import HUGE_PAGE, private_memory, use_huge_pages


@pytest.mark.parametrize(("line", "whole_pages"), [
    ("00200000-00a00000 rw-p 00000000 00:00 0", 4),
    ("00200000-00a00000 rw-p 00000000 00:00 0    [heap]", 4),
    ("00100000-00500000 rw-p 00000000 00:00 0", 1),  # 1 MB to 5 MB: only 2 to 4 is a whole page
    ("00200000-002ff000 rw-p 00000000 00:00 0", 0),  # smaller than one
    ("00200000-00a00000 r--p 00000000 00:00 0", 0),  # read only
    ("00200000-00a00000 rw-s 00000000 00:05 0", 0),  # shared
    ("00200000-00a00000 rw-p 00000000 08:01 42   /usr/lib/some library.so", 0),
    ("00200000-00a00000 rw-p 00000000 00:00 0    [stack]", 0),
])
def test_only_whole_pages_of_private_memory_count(line, whole_pages):
    assert sum(end - start for start, end in private_memory(line)) == whole_pages * HUGE_PAGE
    assert all(start % HUGE_PAGE == end % HUGE_PAGE == 0 for start, end in private_memory(line))


def test_memory_keeps_what_it_holds():
    weights = torch.randn(3, 1 << 20)
    before = weights.clone()
    assert use_huge_pages() >= 0
    assert torch.equal(weights, before)


def test_other_systems_are_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "MAPS", tmp_path / "none")
    assert use_huge_pages() == 0
    monkeypatch.setattr(sys, "platform", "darwin")
    assert use_huge_pages() == 0
