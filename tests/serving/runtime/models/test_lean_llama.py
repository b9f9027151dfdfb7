"""The fast path equals the library's module: ragged rows, rollbacks, restricted heads, grouped
queries, rotary scaling."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from draftwell.serving.artifacts.rounding import quantise
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.lean_llama import LeanLlama, fits
from draftwell.serving.runtime.models.linear import Int8Linear, linear
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import over_slots
from tests.support.models.llama_shapes import SHAPES, SIZES, TEXTS, check_ragged, llama, ragged


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_rows_equal_the_plain_module(shape):
    check_ragged(LeanLlama, shape)


def test_a_restricted_head_and_hidden_states_equal_the_adapters():
    module, head = llama(), torch.tensor([1, 5, 60])
    outputs = []
    for model in (TransformersModel(module, head_tokens=head), LeanLlama(module, head_tokens=head)):
        slot = model.open()
        outputs.append(model.forward([Forward("draft", slot, (3, 1, 4), 2)])[0])
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits)
    torch.testing.assert_close(outputs[1].hidden, outputs[0].hidden)


def test_bfloat16_weights_packed_for_the_processor_give_the_same_product():
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    exact = x.double() @ weight.double().T
    assert (linear(weight)(x) - exact).abs().max() <= 2 * (
        torch.nn.functional.linear(x, weight) - exact
    ).abs().max()


def test_bfloat16_logits_are_as_near_to_float32_as_the_librarys():
    exact = ragged(LeanLlama(llama(), slots=3), TEXTS)
    module = llama(torch.bfloat16)
    mine, theirs = (
        ragged(LeanLlama(module, slots=3), TEXTS),
        ragged(TransformersModel(module, slots=3), TEXTS),
    )
    error = [
        max(float((a - e).abs().max()) for a, e in zip(logits, exact, strict=True))
        for logits in (mine, theirs)
    ]
    assert error[0] <= 1.5 * error[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_runs_on_without_its_modules_projections(dtype):
    module = llama(dtype)
    model = LeanLlama(module, slots=6)
    before, held = ragged(model, TEXTS), sum(p.numel() for p in module.parameters())
    model.release()
    assert sum(p.numel() for p in module.parameters()) < held / 2
    assert all(torch.equal(a, b) for a, b in zip(ragged(model, TEXTS), before, strict=True))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_eight_bit_weights_are_the_rounded_weight_whatever_the_number_of_rows(rows):
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(rows, 64).bfloat16()
    whole, scale = quantise(weight)
    exact = x.double() @ (whole * scale[:, None]).double().T
    torch.testing.assert_close(Int8Linear(weight)(x).double(), exact, atol=0.15, rtol=0.02)


def test_a_draft_in_float32_keeps_its_weights():
    module = llama()
    same = [ragged(LeanLlama(module, slots=3, int8=int8), TEXTS) for int8 in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*same, strict=True))


def test_only_models_of_known_architectures_take_the_fast_path():
    assert isinstance(over_slots(llama()), LeanLlama)
    assert not fits(llama(attention_bias=True))
    assert not fits(llama(hidden_act="gelu"))
    qwen, neox = (
        tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES)),
        tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZES)),
    )
    assert not fits(qwen)
    assert type(over_slots(qwen)) is LeanLlama
    assert type(over_slots(neox)) is TransformersModel
