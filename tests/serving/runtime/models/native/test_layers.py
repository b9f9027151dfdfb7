"""A token's logits are the same to the bit whatever runs beside it: that is what makes speculation
exact in every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from draftwell.serving.number_format import WEIGHTS, Weights
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from tests.support.errors import raises_code
from tests.support.models.by_library import by_library, compiles, logits_of
from tests.support.models.lean_families import CONFIGS, lean_family
from tests.support.models.llama_shapes import llama, plain_logits, random_tokens

pytestmark = compiles
DTYPES = (torch.float32, torch.bfloat16)
TEXT = random_tokens(75)
ODD = {"hidden_size": 40, "intermediate_size": 44, "num_attention_heads": 5, "head_dim": 10}
ODD |= {"num_key_value_heads": 5}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert torch.isfinite(one).all()
    return torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_cut_anywhere_has_the_same_logits(name: str, dtype: torch.dtype) -> None:
    model = by_library(lean_family(name, dtype))
    whole = logits_of(model, TEXT)
    one_by_one = logits_of(model, TEXT, range(1, len(TEXT)))
    assert same(whole, one_by_one)
    for cuts in ((1,), (7, 8, 30), (64,), (63, 65), (12, 24, 36, 48, 60)):
        assert same(whole, logits_of(model, TEXT, cuts)), cuts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral with a window", "gemma2"])
def test_parts_of_a_long_text_that_share_keys_are_read_as_tokens_alone(
    name: str, dtype: torch.dtype
) -> None:
    """Several chunks of positions; of a window longer than one each part has its own."""
    module = lean_family(name, dtype)
    if module.config.model_type != "llama":
        module.config.sliding_window = 100
    model, text = by_library(module, max_context=256), random_tokens(230)
    one_by_one = logits_of(model, text, range(1, len(text)))
    for count in (1, 3):
        with threads(count):
            for cuts in ((), (1,), (70, 201)):
                assert same(one_by_one, logits_of(model, text, cuts)), (count, cuts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_stands_beside_a_row_changes_nothing(name: str, dtype: torch.dtype) -> None:
    model = by_library(lean_family(name, dtype), slots=8)
    wanted = [logits_of(model, random_tokens(5 + 9 * i, i)) for i in range(8)]
    slots = [model.open() for _ in range(8)]
    for order in (range(8), (5, 1, 7, 0, 2, 6, 4, 3)):
        rows = [
            Forward("target", slots[i], random_tokens(5 + 9 * i, i), keep=5 + 9 * i) for i in order
        ]
        for i, output in zip(order, model.forward(rows), strict=True):
            assert same(wanted[i], output.logits), i
            model.rollback(slots[i], 0)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_of_threads_changes_a_result(dtype: torch.dtype, count: int) -> None:
    model = by_library(lean_family("qwen3", dtype))
    wanted = logits_of(model, TEXT)
    with threads(count):
        assert same(wanted, logits_of(model, TEXT))
        assert same(wanted, logits_of(model, TEXT, (1, 2, *range(60, len(TEXT)))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral with a window", "gemma2"])
def test_a_path_of_a_tree_is_read_as_if_it_stood_alone(name: str, dtype: torch.dtype) -> None:
    """Wherever the tree begins in a vector or a chunk of positions, in any order of siblings."""
    model = by_library(lean_family(name, dtype), slots=3)
    parents = (-1, 0, 0, -1, 1, 2, 4, 3, 4)
    swapped = (-1, -1, 0, 0, 1, 3, 2, 5, 5)
    of_swapped = (0, 3, 2, 1, 7, 4, 5, 8, 6)  # the place in the first tree of each token
    for start in (3, 5, 60, 62):
        prefix, tokens = random_tokens(start, start), random_tokens(9, 9)
        wanted = []
        for at in range(9):
            path: list[int] = []
            while at >= 0:
                path, at = [tokens[at], *path], parents[at]
            wanted.append(logits_of(model, (*prefix, *path))[-1])
        for order, tree in ((range(9), parents), (of_swapped, swapped)):
            slot = model.open()
            model.forward([Forward("target", slot, prefix)])
            row = Forward("target", slot, tuple(tokens[i] for i in order), 9, parents=tree)
            (found,) = model.forward([row])
            model.close(slot)
            for place, i in enumerate(order):
                assert same(found.logits[place], wanted[i]), (start, place)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_that_is_read_in_parts_is_read_as_its_paths(dtype: torch.dtype) -> None:
    """More queries than a tile has rows and than are read together, and heads that fill no vector;
    paths that begin before and behind a block of 32 positions."""
    shape = {
        "hidden_size": 80,
        "num_attention_heads": 20,
        "num_key_value_heads": 1,
        "head_dim": 40,
    }
    model = by_library(llama(initializer_range=0.3, **shape).to(dtype), slots=2)
    tokens, parents = random_tokens(40, 7), tuple((i - 1) // 3 if i else -1 for i in range(40))
    for start in (31, 33, 63):
        prefix, slot = random_tokens(start, start), model.open()
        model.forward([Forward("target", slot, prefix)])
        (found,) = model.forward([Forward("target", slot, tokens, 40, parents=parents)])
        model.close(slot)
        for place in (0, 5, 18, 39):
            path, at = list[int](), place
            while at >= 0:
                path, at = [tokens[at], *path], parents[at]
            assert same(found.logits[place], logits_of(model, (*prefix, *path))[-1]), (start, place)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_weights_are_read_alike_by_any_number_of_tokens(
    dtype: torch.dtype, weights: Weights
) -> None:
    module = llama(hidden_size=64, intermediate_size=128, initializer_range=0.3).to(dtype)
    model = by_library(module, weights=weights)
    whole = logits_of(model, TEXT)
    assert same(whole, logits_of(model, TEXT, range(1, len(TEXT))))
    by_torch = logits_of(LeanLlama(module.float(), weights=weights), TEXT)
    full = logits_of(LeanLlama(module.float()), TEXT)
    error, rounding = (whole - by_torch).abs().mean(), (full - by_torch).abs().mean()
    assert error < (1e-5 if dtype == torch.float32 else rounding / 3)


def test_numbers_too_small_for_a_normal_float_are_treated_alike() -> None:
    module = llama(initializer_range=0.3)
    with torch.no_grad():
        module.model.layers[0].self_attn.v_proj.weight *= 1e-38
        module.model.layers[1].mlp.up_proj.weight *= 1e-39
    model = by_library(module)
    assert same(logits_of(model, TEXT), logits_of(model, TEXT, range(1, len(TEXT))))


def test_what_a_slot_held_before_reaches_nobody() -> None:
    model = by_library(lean_family("llama"), slots=2)
    wanted, slot = logits_of(model, TEXT[:9]), model.open()
    model.forward([Forward("target", slot, TEXT)])
    for memory in [*model.slots.keys, *model.slots.values]:
        memory[slot, :, :75] = float("nan")
    model.rollback(slot, 0)
    row = Forward("target", slot, TEXT[:9], 9)
    assert same(wanted, model.forward([row])[0].logits)


@pytest.mark.parametrize("skip", [{0}, {3}, {1, 2}, {0, 1, 4}])
def test_sublayers_that_are_skipped_add_nothing(skip: set[int]) -> None:
    module, tokens = lean_family("gemma3"), TEXT[:9]
    found = []
    for make in (LeanLlama, by_library):
        model = make(module)
        row = Forward("target", model.open(), tokens, 9, skip=frozenset(skip))
        found.append(model.forward([row])[0].logits)
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


def test_longrope_is_the_librarys_up_to_the_length_where_it_changes() -> None:
    """Behind it transformers reads all of a text with other factors: a cached key would have others
    than the query that reads it."""
    module, text = lean_family("phi3 with LongRoPE"), random_tokens(120)
    model = by_library(module, max_context=128)
    found = logits_of(model, text)
    torch.testing.assert_close(found, plain_logits(module, text), atol=1e-4, rtol=0)
    assert same(found, logits_of(model, text, (60, 99, 100, 101, 119)))
    with raises_code("unsupported_architecture", "128"):
        by_library(module, max_context=200)


def test_numbers_beside_a_rows_inputs_reach_nobody() -> None:
    """Sizes that fill no vectors: what another row left there is not a number."""
    model = by_library(llama(**ODD))
    wanted = logits_of(model, TEXT)
    broken = llama(**ODD)
    with torch.no_grad():
        broken.model.embed_tokens.weight.fill_(float("nan"))
    logits_of(by_library(broken), TEXT)
    assert same(wanted, logits_of(model, TEXT))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_number_formats_are_torchs(dtype: torch.dtype) -> None:
    assert by_library(llama(dtype)).native is None


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str) -> None:
    module = lean_family(name)
    exact = plain_logits(module, TEXT)
    module = module.bfloat16()
    mine, theirs = logits_of(by_library(module), TEXT), plain_logits(module, TEXT).float()
    assert (mine - exact).abs().mean() <= 1.05 * (theirs - exact).abs().mean()
