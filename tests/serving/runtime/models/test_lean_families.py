"""One lean module runs every family of its list as transformers does; its rows attend together, its
prompts pass by pass."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers as tf

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models import lean_llama
from draftwell.serving.runtime.models.architecture import architecture_of
from draftwell.serving.runtime.models.lean_llama import LeanLlama, fits, runs
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import over_slots
from tests.support.models.by_library import ALL_WAYS, compiles
from tests.support.models.lean_families import CONFIGS, SHARP, lean_family
from tests.support.models.llama_shapes import (
    SHAPES,
    SIZES,
    TEXTS,
    check_ends,
    check_ragged,
    llama,
    ragged,
    random_tokens,
    read_starts,
)

COMPILED = ["off", pytest.param("on", marks=compiles)]


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_rows_and_a_rejected_draft_equal_the_plain_module(name, compiled):
    module = lean_family(name)
    assert type(over_slots(module)) is LeanLlama
    check_ragged(partial(over_slots, compiled=compiled), module, atol=1e-4)


@pytest.mark.parametrize("make", ALL_WAYS)
@pytest.mark.parametrize("shape", ["one key head", "all key heads", "tied"])
def test_ragged_rows_of_further_shapes_equal_the_plain_module(shape, make):
    check_ragged(make, llama(**SHAPES[shape]))


@pytest.mark.parametrize("make", ALL_WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_single_tokens_drafts_and_the_end_of_a_prompt_in_one_pass_equal_the_plain_module(
    name, make
):
    module = lean_family(name)
    counts = (1, 3, 1, 12, 3, 1, 40)
    texts = [list(random_tokens(9 + count, count + i)) for i, count in enumerate(counts)]
    model = make(module, slots=len(counts))
    slots = read_starts(model, texts, counts)
    check_ends(model, module, slots, texts, counts)


@pytest.mark.parametrize("make", ALL_WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_long_prompts_read_pass_by_pass_equal_the_plain_module(name, make, monkeypatch):
    """A row that decodes goes along, and every prompt is cut in another place."""
    monkeypatch.setattr(lean_llama, "CHUNK", 16)
    module = lean_family(name)
    texts = [list(random_tokens(count, count)) for count in (10, 41, 23)]
    model = make(module, slots=3)
    slots = [*read_starts(model, texts[:1], [1]), model.open(), model.open()]
    check_ends(model, module, slots, texts, [1, 41, 23], [1, 41, 2])


@pytest.mark.parametrize("make", ALL_WAYS)
@pytest.mark.parametrize("wanted", [(0, 1, 2), (7, 0), (6, 3, 1, 0), (2, 4, 5)], ids=str)
def test_rows_of_any_slots_in_any_order_equal_rows_alone(wanted, make):
    module = lean_family("qwen3")
    model, alone = make(module, slots=8), make(module, slots=1)
    for _ in range(8):
        model.open()
    texts = {slot: random_tokens(3 + slot, slot) for slot in wanted}
    model.forward([Forward("target", slot, text[:2]) for slot, text in texts.items()])
    outputs = model.forward([Forward("target", slot, text[2:]) for slot, text in texts.items()])
    for output, text in zip(outputs, texts.values(), strict=True):
        slot = alone.open()
        torch.testing.assert_close(
            output.logits,
            alone.forward([Forward("target", slot, text)])[0].logits,
            atol=1e-5,
            rtol=0,
        )
        alone.close(slot)


@pytest.mark.parametrize("make", ALL_WAYS)
def test_a_slot_that_went_wrong_reaches_no_later_request(make):
    """Where positions that a row does not have count with weight 0: 0 · NaN is NaN."""
    module = lean_family("llama")
    model = make(module, slots=2)
    slot = model.open()
    model.forward([Forward("target", slot, random_tokens(9))])
    for memory in [*model.slots.keys, *model.slots.values]:
        memory[slot, :, :9] = float("nan")
    model.close(slot)
    slots = [model.open() for _ in range(2)]
    model.forward(
        [Forward("target", slots[0], (1,)), Forward("target", slots[1], random_tokens(9))]
    )
    outputs = model.forward([Forward("target", slot, (2,)) for slot in slots])
    assert all(torch.isfinite(output.logits).all() for output in outputs)


@pytest.mark.parametrize(
    "config",
    [
        tf.Phi3Config(
            **SHARP,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        tf.LlamaConfig(**SHARP, hidden_act="gelu"),
        tf.GraniteConfig(**SHARP),
        tf.Gemma2Config(**SHARP, use_bidirectional_attention=True),
    ],
    ids=["partial rotary", "gelu", "granite", "bidirectional"],
)
def test_what_is_not_known_takes_the_librarys_module(config):
    assert architecture_of(config) is None


def test_a_model_whose_text_part_is_one_of_several_takes_the_librarys_module():
    class Composite:
        config = tf.LlavaConfig(text_config=tf.LlamaConfig(**SIZES))

    assert not runs(Composite)


@pytest.mark.parametrize("make", ALL_WAYS)
def test_a_restricted_head_and_hidden_states_equal_the_adapters(make):
    module, head = llama(), torch.tensor([1, 5, 60])
    outputs = []
    for model in (TransformersModel(module, head_tokens=head), make(module, head_tokens=head)):
        slot = model.open()
        outputs.append(model.forward([Forward("draft", slot, (3, 1, 4), 2)])[0])
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs[1].states, outputs[0].states, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", ALL_WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_runs_on_without_its_modules_projections(dtype, make):
    module = llama(dtype)
    model = make(module, slots=6)
    before, held = ragged(model, TEXTS), sum(p.numel() for p in module.parameters())
    model.release()
    assert sum(p.numel() for p in module.parameters()) < held / 2
    assert all(torch.equal(a, b) for a, b in zip(ragged(model, TEXTS), before, strict=True))


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
