"""Rounded weights: exactly what is specified, one product whatever the path, and lossless
strategies stay lossless over them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint
from draftwell.serving.number_format import WEIGHTS, Weights
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.linear import linear
from draftwell.serving.runtime.models.quantised import GROUP, rounded
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import LoadSettings, load_pair, over_slots
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.cases import in_turn
from tests.support.errors import raises_code
from tests.support.models.eight_requests import outputs, requests
from tests.support.models.llama_shapes import TEXTS, llama, ragged
from tests.support.models.resources import NEEDED
from tests.support.models.unbatched_families import module_of

SIZES = {"hidden_size": 64, "intermediate_size": 128}
"""int4 takes inputs in multiples of 32."""


def planted(weights: Weights) -> torch.Tensor:
    """A weight that rounding must return as it is: whole numbers, all of them in every group, times
    powers of two."""
    shuffle = torch.Generator().manual_seed(1)
    if weights == "int8":
        whole = torch.stack([torch.randperm(255, generator=shuffle)[:96] - 127 for _ in range(64)])
        whole[:, 5] = 127
        return whole * 2.0 ** -torch.arange(64).remainder(7)[:, None]
    groups = torch.stack(
        [
            torch.stack([torch.randperm(GROUP, generator=shuffle) % 16 for _ in range(3)])
            for _ in range(64)
        ]
    )
    return (
        (groups - 8.0) * 2.0 ** -torch.arange(3)[None, :, None]
        + torch.tensor([0.0, 4.0, -1.0])[None, :, None]
    ).flatten(1)


def with_rounded(module: Any, weights: Weights) -> Any:
    """The module with the weight of every layer's products replaced by what it is rounded to; the
    head keeps its own."""
    with torch.no_grad():
        for part in module.model.modules():
            if isinstance(part, torch.nn.Linear):
                part.weight = torch.nn.Parameter(rounded(part.weight, weights).dense())
    return module


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_weight_that_needs_no_more_bits_stays_as_it_is(weights: Weights) -> None:
    assert torch.equal(rounded(planted(weights), weights).dense(), planted(weights))


def test_a_channel_of_int8_has_a_scale_of_its_own_and_errs_by_half_of_it() -> None:
    weight = (
        torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-3, 2, 50)[:, None]
    )
    found = rounded(weight, "int8")
    assert found.whole.dtype == torch.int8
    assert found.whole.shape == weight.shape
    # the scale is a bfloat16 number, which may be a little small
    wide = weight.abs() > 127 * found.scale.float()[:, None]
    assert (
        (found.dense() - weight).abs()
        <= found.scale.float()[:, None] * torch.where(wide, 1.0, 0.501)
    ).all()


def test_a_group_of_int4_has_a_scale_and_a_zero_of_its_own() -> None:
    sizes = torch.tensor([1.0, 100, 0.01]).repeat_interleave(GROUP)
    weight = torch.randn(16, 3 * GROUP, generator=torch.Generator().manual_seed(0)) * sizes
    found = rounded(weight + 3, "int4")
    step = found.scale.float().repeat_interleave(GROUP, dim=1)
    # 0.02: half a step of a bfloat16 zero near 3
    assert ((found.dense() - weight - 3).abs() <= 0.6 * step + 0.02).all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_weight_at_all_is_none_after_rounding(weights: Weights) -> None:
    """A padded target has channels of zeros."""
    assert torch.equal(rounded(torch.zeros(16, 64), weights).dense(), torch.zeros(16, 64))


def test_inputs_that_fill_no_groups_of_int4_are_rounded_to_int8() -> None:
    weight = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(weight, "int4").dense(), rounded(weight, "int8").dense())


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_the_product_is_that_of_the_rounded_weight_whatever_the_number_of_rows(
    weights: Weights, bias: bool, rows: int
) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(rows, 64).bfloat16()
    plus = torch.randn(96).bfloat16() if bias else None
    exact = x.double() @ rounded(weight, weights).dense().double().T + (
        0 if plus is None else plus.double()
    )
    error = (linear(weight, plus, weights)(x).double() - exact).abs()
    coarse = (x.double() @ weight.double().T + (0 if plus is None else plus.double()) - exact).abs()
    assert error.max() < 0.15
    assert error.mean() < coarse.mean() / 2, "nearer to the rounded weight than the full weight is"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_model_in_float32_is_the_module_with_rounded_weights(weights: Weights) -> None:
    want = ragged(TransformersModel(with_rounded(llama(**SIZES), weights), slots=3), TEXTS)
    found = ragged(LeanLlama(llama(**SIZES), weights=weights, slots=3), TEXTS)
    full = ragged(LeanLlama(llama(**SIZES), slots=3), TEXTS)
    for logits, expected, other in zip(found, want, full, strict=True):
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
        assert not torch.allclose(logits, other, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "weights"), in_turn(["vanilla_sd", "prompt_lookup", "svip", "adaedl"], WEIGHTS)
)
def test_a_lossless_strategy_gives_what_plain_decoding_of_the_rounded_target_gives(
    name: str, weights: Weights
) -> None:
    sharp = llama(initializer_range=0.3, **SIZES)
    target, draft = (
        over_slots(sharp, weights=weights),
        over_slots(llama(initializer_range=0.3, **SIZES)),
    )
    engine = Engine({"target": target, "draft": draft})
    runs = [
        outputs(
            engine,
            partial(build_strategy, each, NEEDED.get(each, {})),
            requests(61, 0.0),
            together=False,
        )
        for each in ("autoregressive", name)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["float32-int8", "bfloat16-int8", "bfloat16-int4"])
def test_a_pair_with_rounded_weights_is_another_pair(
    tiny_models: dict[Role, Path], name: Any
) -> None:
    files = PairFiles("tiny", tiny_models["target"], tiny_models["draft"])
    pair, full = (
        load_pair(files, LoadSettings(dtype=each)) for each in (name, name.partition("-")[0])
    )
    assert (pair.dtype, pair.fingerprint) == (name, fingerprint(files, name))
    assert pair.fingerprint != full.fingerprint
    assert pair.models["target"].dtype == full.models["target"].dtype
    rows = [
        one.models["target"]
        .forward([Forward("target", one.models["target"].open(), (5, 4, 3), 1)])[0]
        .logits
        for one in (pair, full)
    ]
    assert not torch.equal(*rows)


def test_what_cannot_have_rounded_weights_is_refused_in_a_line(
    tiny_models: dict[Role, Path],
) -> None:
    files = PairFiles("tiny", tiny_models["target"], tiny_models["draft"])
    with raises_code("weights_unsupported", "int8", "cuda", "the dtype bfloat16"):
        load_pair(files, LoadSettings(dtype="bfloat16-int8", device="cuda"))
    with raises_code("weights_unsupported", "int4", "the dtype float32"):
        load_pair(files, LoadSettings(dtype="float32-int4"), keep_modules=True)
    with raises_code("weights_unsupported", "gpt_neo", "int8"):
        over_slots(module_of("gpt_neo"), weights="int8")
