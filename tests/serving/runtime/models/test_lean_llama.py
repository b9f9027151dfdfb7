"""The fast path equals the library's module: ragged rows, rollbacks, restricted heads, grouped queries, rotary scaling."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from serving.artifacts.distilled_draft import quantise
from serving.runtime.commands import Forward
from serving.runtime.models.lean_llama import LeanLlama, fits, linear, linear_int8
from serving.runtime.models.transformers_model import TransformersModel
from serving.runtime.pair import over_slots

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
SHAPES = {
    "grouped": {}, "one key head": {"num_key_value_heads": 1}, "all key heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16}, "tied": {"tie_word_embeddings": True}, "llama3 rope": {"rope_parameters": LLAMA3}}


def llama(dtype: torch.dtype = torch.float32, **changes):
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES | changes)).to(dtype).eval()


def ragged(model, texts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of every token from the third on, with a rejected draft of four on the way."""
    slots = [model.open() for _ in texts]
    model.forward([Forward("target", s, tuple(t[:3])) for s, t in zip(slots, texts, strict=True)])
    model.forward([Forward("target", slots[1], (7, 7, 7, 7), 1)])
    model.rollback(slots[1], 3)
    one = model.forward([Forward("target", s, (t[3],)) for s, t in zip(slots, texts, strict=True)])
    rest = model.forward([Forward("target", s, tuple(t[4:]), len(t) - 4) for s, t in zip(slots, texts, strict=True)])
    return [torch.cat([a.logits, b.logits]) for a, b in zip(one, rest, strict=True)]


TEXTS = [torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 14, 6)]


def check_ragged(adapter, shape: str) -> None:
    """Ragged rows through an adapter equal the plain module's, text by text."""
    module = llama(**SHAPES[shape])
    with torch.no_grad():
        expected = [module(torch.tensor([t])).logits[0, 3:] for t in TEXTS]
    for logits, want in zip(ragged(adapter(module, slots=3), TEXTS), expected, strict=True):
        torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)


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
    assert (linear(weight)(x) - exact).abs().max() <= 2 * (torch.nn.functional.linear(x, weight) - exact).abs().max()


def test_bfloat16_logits_are_as_near_to_float32_as_the_librarys():
    exact = ragged(LeanLlama(llama(), slots=3), TEXTS)
    module = llama(torch.bfloat16)
    mine, theirs = ragged(LeanLlama(module, slots=3), TEXTS), ragged(TransformersModel(module, slots=3), TEXTS)
    error = [max(float((a - e).abs().max()) for a, e in zip(logits, exact, strict=True)) for logits in (mine, theirs)]
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
    torch.testing.assert_close(linear_int8(weight)(x).double(), exact, atol=0.15, rtol=0.02)


def test_a_draft_in_float32_keeps_its_weights():
    module = llama()
    same = [ragged(LeanLlama(module, slots=3, int8=int8), TEXTS) for int8 in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*same, strict=True))


def test_only_models_of_llamas_shape_take_the_fast_path():
    assert isinstance(over_slots(llama()), LeanLlama)
    assert not fits(llama(attention_bias=True))
    assert not fits(llama(hidden_act="gelu"))
    qwen = tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES))
    assert not fits(qwen)
    assert type(over_slots(qwen)) is TransformersModel
