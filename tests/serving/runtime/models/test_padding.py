"""The cost-padded target: more parameters, really written, and not one bit of output changed."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.padding import feed_forwards, pad_to, parameter_count
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from tests.support.errors import raises_code
from tests.support.models.tiny import llama
from tests.support.paths import REPO

WANTED = 200_000


def padded(module: Any, parameters: float = WANTED) -> Any:
    other = copy.deepcopy(module)
    pad_to(other, parameters)
    return other


@pytest.mark.parametrize("adapter", [TransformersModel, LeanLlama])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_equal_bit_for_bit(dtype: torch.dtype, adapter: type[TransformersModel]) -> None:
    """Rows of one and of many tokens: the kernels for either are different ones."""
    module = copy.deepcopy(llama(2)).to(dtype)
    plain, wide = adapter(module), adapter(padded(module))
    for size in (1, 2, 5, 8, 33, 64, 101, 200):
        slots = plain.open(), wide.open()
        tokens = tuple(3 + i % 20 for i in range(size))
        one, other = (
            model.forward([Forward("target", slot, tokens, keep=size)])[0]
            for model, slot in zip((plain, wide), slots, strict=True)
        )
        assert torch.equal(one.logits, other.logits), size
        assert torch.equal(one.states, other.states), size
        plain.close(slots[0])
        wide.close(slots[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generate_of_transformers_is_the_same(dtype: torch.dtype) -> None:
    module = copy.deepcopy(llama(2)).to(dtype)
    module.set_attn_implementation("sdpa")  # another test may have put the shared module over slots
    prompt = torch.tensor([[5, 6, 7]])
    settings = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(
        module.generate(prompt, **settings), padded(module).generate(prompt, **settings)
    )


def test_the_number_of_parameters_is_met() -> None:
    module = llama(2)
    wide = copy.deepcopy(module)
    width = module.config.intermediate_size
    got = pad_to(wide, WANTED)
    assert got == parameter_count(wide)
    assert abs(got - WANTED) <= 0.5 * 64 * 3 * 32 * 2
    assert wide.config.intermediate_size > width
    assert (wide.config.intermediate_size - width) % 64 == 0
    assert llama(2).config.intermediate_size == width, "the module that was copied is as it was"
    assert [p.gate_proj.out_features for p in feed_forwards(wide.model.layers[0].mlp)] == [
        width,
        wide.config.intermediate_size - width,
    ]
    assert pad_to(copy.deepcopy(module), parameter_count(module)) == parameter_count(module)


@pytest.mark.slow
def test_zeros_are_written_pages() -> None:
    """Pages that are only reserved share one page of zeros: a padded model would then be as fast as
    the plain one.

    In a process of its own, because memory that earlier tests gave back to the allocator is
    resident already.
    """
    script = (
        "import psutil\n"
        "from tests.serving.runtime.models.test_padding import llama, padded, parameter_count\n"
        "module, memory = llama(2), psutil.Process().memory_info\n"
        "before = memory().rss\n"
        "wide = padded(module, 20e6)\n"
        "print(memory().rss - before, parameter_count(wide))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True
    )
    grown, parameters = map(int, done.stdout.split())
    assert grown > 0.9 * 80e6
    assert parameters > 19e6


@pytest.mark.parametrize("parameters", [10, float("inf"), float("nan"), -1.0])
def test_a_number_that_cannot_be_reached_is_refused(parameters: float) -> None:
    with raises_code("bad_pad_target", f"{parameters:g}"):
        pad_to(copy.deepcopy(llama(1)), parameters)


def test_a_feed_forward_of_another_shape_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with raises_code("unsupported_architecture", "gpt2", "Llama"):
        pad_to(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=24)), 1e6)
