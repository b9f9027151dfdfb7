"""The kernel equals attention in float32: any number of tokens, over any length, with windows,
trees and bounded scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.artifacts.compiled_libraries import LIBRARY
from draftwell.serving.runtime.models.compiled_library import VARIES, build_library, load
from draftwell.serving.runtime.models.row_attention import additive
from draftwell.serving.runtime.models.row_kernel import fits, row_attention
from draftwell.serving.runtime.models.visible import visible
from tests.support.models.other_processors import (
    PROCESSORS,
    check_any_thread_count,
    compiled_for,
    compiles,
)

HEADS, POSITIONS = 6, 700
SHAPES = [(2, 64), (1, 96), (6, 256)]
"""Key heads and sizes of heads."""
SCALE = 0.2
SOFTCAP = 3.0
CASES = [
    (1, 1, None),
    (2, 3, None),
    (3, 33, None),
    (7, 128, None),
    (8, 129, None),
    (16, 300, None),
    (5, 600, 40),
    (16, 512, 7),
    (33, 300, None),
    (64, 512, 7),
]
"""Tokens, positions with theirs, and window."""


class Attention(torch.nn.Module):
    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        return tuple(
            row_attention(query, keys, values, mask, SCALE, softcap) for softcap in (0.0, SOFTCAP)
        )


@pytest.fixture(scope="module", params=PROCESSORS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The kernel as it is compiled for a kind of processor."""
    folder = tmp_path_factory.mktemp("kernel")
    with compiled_for(request.param, folder):
        memory = torch.zeros(3, POSITIONS, 32).bfloat16()
        arguments = torch.zeros(3, HEADS, 32), memory, memory.clone(), torch.zeros(3, 9).bfloat16()
        sizes = {0: VARIES, 2: VARIES}
        build_library(
            Attention(), arguments, (sizes, sizes, sizes, {0: VARIES, 1: VARIES}), folder / LIBRARY
        )
        yield folder / LIBRARY


def random_arguments(
    tokens: int, kv_heads: int = 2, dim: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    random = torch.Generator().manual_seed(5)
    query = 3 * torch.randn(tokens, HEADS, dim, generator=random)
    keys, values = (
        torch.randn(kv_heads, POSITIONS, dim, generator=random).bfloat16() for _ in range(2)
    )
    return query.bfloat16().float(), keys, values


def by_definition(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    keys, values = (
        one[:, : mask.shape[1]].double().repeat_interleave(HEADS // len(keys), 0)
        for one in (keys, values)
    )
    out = F.scaled_dot_product_attention(
        query.double().transpose(0, 1), keys, values, mask.double(), scale=SCALE
    )
    return out.transpose(0, 1).reshape(len(query), -1).float()


@pytest.mark.parametrize(("tokens", "end", "window"), CASES)
def test_what_torch_computes_is_attention(tokens: int, end: int, window: int | None) -> None:
    query, keys, values = random_arguments(tokens)
    mask = additive(visible(end - tokens, tokens, window), keys)
    keys[:, end:], values[:, end:] = torch.nan, torch.nan
    torch.testing.assert_close(
        row_attention(query, keys, values, mask, SCALE, 0.0),
        by_definition(query, keys, values, mask),
        atol=1e-4,
        rtol=1e-4,
    )


@compiles
@pytest.mark.parametrize(("kv_heads", "dim"), SHAPES)
def test_the_kernel_computes_what_torch_does(library: Path, kv_heads: int, dim: int) -> None:
    runner = load(library)
    for tokens, end, window in CASES:
        query, keys, values = random_arguments(tokens, kv_heads, dim)
        parents = [i // 2 - 1 for i in range(tokens)]
        for mask in (
            additive(visible(end - tokens, tokens, window), keys),
            additive(visible(end - tokens, tokens, window, parents), keys),
        ):
            keys[:, end:], values[:, end:] = torch.nan, torch.nan
            found = runner.run([query, keys, values, mask])
            for out, softcap in zip(found, (0.0, SOFTCAP), strict=True):
                wanted = row_attention(query, keys, values, mask, SCALE, softcap)
                # weights of positions may be bfloat16
                torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)
                assert (out - wanted).abs().mean() < 2e-3


@compiles
def test_no_thread_count_changes_a_result(library: Path) -> None:
    query, keys, values = random_arguments(9)
    mask = additive(visible(391, 9, None), keys)
    runner = load(library)
    check_any_thread_count(lambda: runner.run([query, keys, values, mask]))


@compiles
def test_a_slot_may_lie_among_others(library: Path) -> None:
    """Heads of a slot are as far apart as its length says, not as its content does."""
    query, keys, values = random_arguments(4)
    mask = additive(visible(96, 4, None), keys)
    slots = [torch.stack([torch.zeros_like(one), one]) for one in (keys, values)]
    runner = load(library)
    for mine, theirs in zip(
        runner.run([query, *(one[1] for one in slots), mask]),
        runner.run([query, keys, values, mask]),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_heads_of_other_sizes_are_left_to_torch() -> None:
    assert fits(64)
    assert fits(128)
    assert not fits(24)
