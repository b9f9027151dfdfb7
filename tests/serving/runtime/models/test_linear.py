"""Products with a fixed weight on processors without instructions for bfloat16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from draftwell.serving.runtime.models import linear as module
from draftwell.serving.runtime.models.linear import WIDENED_ROWS, Int8Linear, linear


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weight and bias, where the processor cannot multiply bfloat16."""
    monkeypatch.setattr(module, "lacks_bfloat16", lambda: True)
    random = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(*shape, generator=random).bfloat16() for shape in ((40, 64), (48, 64), (48,))
    )  # type: ignore[return-value]


@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_are_multiplied_in_float32_and_rounded_once(
    arguments: tuple[torch.Tensor, ...], biased: bool
) -> None:
    """A prompt of the draft took six times as long in bfloat16; products are rounded at the end
    alone."""
    x, weight, bias = arguments
    product = linear(weight, bias if biased else None)
    exact = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert torch.equal(
        product(x), F.linear(x.float(), weight.float(), bias.float() if biased else None).bfloat16()
    )
    for rows in (1, WIDENED_ROWS, WIDENED_ROWS + 1):
        found = product(x[:rows])
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.double(), exact[:rows], atol=0.01, rtol=0.01)


def test_a_rounded_weight_is_multiplied_so_too(arguments: tuple[torch.Tensor, ...]) -> None:
    """One rounding of each product, besides those of the weight and its scales."""
    x, weight, _ = arguments
    product = Int8Linear(weight)
    whole, scale = product.rounded
    exact = F.linear(x.double(), whole.double() * scale.double()[:, None])
    assert torch.allclose(product(x).double(), exact, atol=0.1, rtol=0.01)
