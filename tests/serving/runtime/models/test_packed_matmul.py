"""The kernel equals the product that it stands for, for any number of tokens, and treats each token
alike whatever stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwell.serving.artifacts.compiled_libraries import LIBRARY
from draftwell.serving.runtime.models import packed_matmul as kernel
from draftwell.serving.runtime.models.compiled_library import VARIES, build_library, load
from draftwell.serving.runtime.models.packed_matmul import OUTPUTS, packed, packed_matmul
from tests.support.models.other_processors import (
    PROCESSORS,
    check_any_thread_count,
    compiled_for,
    compiles,
)


class Products(torch.nn.Module):
    def forward(self, x: Tensor, whole: Tensor, rounded: Tensor) -> tuple[Tensor, Tensor]:
        return packed_matmul(x, whole), packed_matmul(x, rounded)


@pytest.fixture(scope="module", params=PROCESSORS)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The kernel as it is compiled for a kind of processor."""
    folder = tmp_path_factory.mktemp("kernel")
    with compiled_for(request.param, folder):
        arguments = (
            torch.zeros(3, 48, dtype=torch.bfloat16),
            packed(torch.zeros(96, 48, dtype=torch.bfloat16)),
            packed(torch.zeros(96, 48, dtype=torch.int8)),
        )
        build_library(Products(), arguments, ({0: VARIES}, None, None), folder / LIBRARY)
        yield folder / LIBRARY


@compiles
def test_any_number_of_tokens_is_multiplied_as_torch_does(library: Path) -> None:
    random = torch.Generator().manual_seed(3)
    whole = torch.randn(96, 48, generator=random).bfloat16()
    rounded = torch.randint(-127, 128, (96, 48), generator=random, dtype=torch.int8)
    x = torch.randn(61, 48, generator=random).bfloat16()
    runner = load(library)
    alone = [runner.run([row[None].contiguous(), packed(whole), packed(rounded)]) for row in x]
    for tokens in (1, 2, 7, 11, 12, 13, 24, 25, 61):
        found = runner.run([x[:tokens].contiguous(), packed(whole), packed(rounded)])
        for out, weight, number in zip(found, (whole, rounded), range(2), strict=True):
            torch.testing.assert_close(
                out, x[:tokens].float() @ weight.float().T, rtol=1e-5, atol=1e-3
            )
            assert torch.equal(out, torch.cat([one[number] for one in alone[:tokens]])), (
                "a token is rounded alike in any company"
            )


@compiles
def test_no_thread_count_changes_a_result(library: Path) -> None:
    random = torch.Generator().manual_seed(4)
    arguments = [
        torch.randn(5, 48, generator=random).bfloat16(),
        packed(torch.randn(96, 48, generator=random).bfloat16()),
        packed(torch.randint(-127, 128, (96, 48), generator=random, dtype=torch.int8)),
    ]
    runner = load(library)
    check_any_thread_count(lambda: runner.run(arguments))


@compiles
def test_a_weight_packed_for_another_machine_is_refused(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, rounded = torch.ones(96, 48).bfloat16(), torch.ones(96, 48).to(torch.int8)
    monkeypatch.setattr(kernel, "LANES", kernel.LANES * 3)
    monkeypatch.setattr(kernel, "OUTPUTS", kernel.OUTPUTS * 3)
    with pytest.raises(RuntimeError):
        load(library).run([torch.ones(1, 48).bfloat16(), packed(whole), packed(rounded)])


def test_weights_that_fill_no_blocks_stay_as_they_are() -> None:
    for shape in ((OUTPUTS + 1, 8), (OUTPUTS, 7)):
        weight = torch.randn(shape).bfloat16()
        assert packed(weight) is weight
