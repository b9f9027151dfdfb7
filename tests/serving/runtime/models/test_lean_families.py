"""One lean module runs every family of its list as transformers does; its rows attend together, its
prompts pass by pass."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as tf

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models import lean_llama, row_attention
from draftwell.serving.runtime.models.architecture import architecture_of
from draftwell.serving.runtime.models.lean_llama import LeanLlama, fits, runs
from draftwell.serving.runtime.models.linear import linear
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import over_slots
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


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_rows_and_a_rejected_draft_equal_the_plain_module(name):
    module = lean_family(name)
    assert type(over_slots(module)) is LeanLlama
    check_ragged(over_slots, module, atol=1e-4)


@pytest.mark.parametrize("shape", ["one key head", "all key heads", "tied"])
def test_ragged_rows_of_further_shapes_equal_the_plain_module(shape):
    check_ragged(LeanLlama, llama(**SHAPES[shape]))


@pytest.mark.parametrize("name", CONFIGS)
def test_single_tokens_drafts_and_the_end_of_a_prompt_in_one_pass_equal_the_plain_module(name):
    """And no row of one token is padded to as many as the others have."""
    module = lean_family(name)
    counts = (1, 3, 1, 12, 3, 1, 40)
    texts = [list(random_tokens(9 + count, count + i)) for i, count in enumerate(counts)]
    model = LeanLlama(module, slots=len(counts))
    slots = read_starts(model, texts, counts)
    placed = [(slot, 9, count) for slot, count in zip(slots, counts, strict=True)]
    assert [
        part.count for part in row_attention.RowAttention(model.slots, placed, model.shape).parts
    ] == [1, 12, 40]
    check_ends(model, module, slots, texts, counts)


@pytest.mark.parametrize(
    ("taken", "batch"), [((0, 2, 4, 6), 4), ((1, 3, 4), 3), ((0, 1, 2, 4, 5, 6, 7, 8), 9)]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_a_batch_are_copied_where_others_lie_between_them(name, taken, batch):
    """Half of eight slots, the rest being another batch's, would have seven attend."""
    module = lean_family(name)
    texts = [list(random_tokens(9 + i, i)) for i in range(9)]
    model = LeanLlama(module, slots=9)
    slots = read_starts(model, texts, [3] * 9)
    (part,) = row_attention.RowAttention(
        model.slots, [(i, 6 + i, 3) for i in taken], model.shape
    ).parts
    assert part.batch == batch
    check_ends(
        model, module, [slots[i] for i in taken], [texts[i] for i in taken], [3] * len(taken)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_long_prompts_read_pass_by_pass_equal_the_plain_module(name, monkeypatch):
    """A row that decodes goes along, and every prompt is cut in another place."""
    monkeypatch.setattr(lean_llama, "CHUNK", 16)
    monkeypatch.setattr(row_attention, "LONGEST_STEP", 4)
    monkeypatch.setattr(row_attention, "LONGEST_FOLDED", 4)
    module = lean_family(name)
    texts = [list(random_tokens(count, count)) for count in (10, 41, 23)]
    model = LeanLlama(module, slots=3)
    slots = [*read_starts(model, texts[:1], [1]), model.open(), model.open()]
    check_ends(model, module, slots, texts, [1, 41, 23], [1, 41, 2])


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_logits_are_as_near_to_float32_as_the_librarys(name):
    module = lean_family(name)
    exact = ragged(LeanLlama(copy.deepcopy(module), slots=3), TEXTS)
    module = module.bfloat16()
    mine, theirs = (
        ragged(LeanLlama(copy.deepcopy(module), slots=3), TEXTS),
        ragged(TransformersModel(module, slots=3), TEXTS),
    )
    error = [
        torch.cat([(a - e).abs().flatten() for a, e in zip(logits, exact, strict=True)]).mean()
        for logits in (mine, theirs)
    ]
    assert error[0] <= 1.3 * error[1]


def test_eight_rows_attend_in_one_call_a_layer(monkeypatch):
    module, calls, attend = lean_family("llama"), [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(1) or attend(*args, **kwargs),
    )
    model = LeanLlama(module, slots=8)
    slots = [model.open() for _ in range(8)]
    model.forward([Forward("target", slot, (3, 4, 5, 6, 7)[: 2 + slot % 4]) for slot in slots])
    assert len(calls) == module.config.num_hidden_layers


@pytest.mark.parametrize("wanted", [(0, 1, 2), (7, 0), (6, 3, 1, 0), (2, 4, 5)], ids=str)
def test_rows_of_any_slots_in_any_order_equal_rows_alone(wanted):
    module = lean_family("qwen3")
    model, alone = LeanLlama(module, slots=8), LeanLlama(module, slots=1)
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


def test_a_slot_that_went_wrong_reaches_no_later_request():
    """A row beside longer ones is attended over positions that it does not have: what stands there
    has weight 0, and 0 · NaN is NaN."""
    module = lean_family("llama")
    model = LeanLlama(module, slots=2)
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
        tf.LlamaConfig(
            **SHARP, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        ),
        tf.LlamaConfig(**SHARP, hidden_act="gelu"),
        tf.GraniteConfig(**SHARP),
        tf.Gemma2Config(**SHARP, use_bidirectional_attention=True),
    ],
    ids=["partial rotary", "dynamic rope", "gelu", "granite", "bidirectional"],
)
def test_what_is_not_known_takes_the_librarys_module(config):
    assert architecture_of(config) is None


def test_a_model_whose_text_part_is_one_of_several_takes_the_librarys_module():
    class Composite:
        config = tf.LlavaConfig(text_config=tf.LlamaConfig(**SIZES))

    assert not runs(Composite)


def test_a_restricted_head_and_hidden_states_equal_the_adapters():
    module, head = llama(), torch.tensor([1, 5, 60])
    outputs = []
    for model in (TransformersModel(module, head_tokens=head), LeanLlama(module, head_tokens=head)):
        slot = model.open()
        outputs.append(model.forward([Forward("draft", slot, (3, 1, 4), 2)])[0])
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits)
    torch.testing.assert_close(outputs[1].hidden, outputs[0].hidden)


def test_bfloat16_weights_packed_for_the_processor_give_the_same_product():
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 64, generator=random).bfloat16() for rows in (96, 5))
    exact = x.double() @ weight.double().T
    assert (linear(weight)(x) - exact).abs().max() <= 2 * (
        torch.nn.functional.linear(x, weight) - exact
    ).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_runs_on_without_its_modules_projections(dtype):
    module = llama(dtype)
    model = LeanLlama(module, slots=6)
    before, held = ragged(model, TEXTS), sum(p.numel() for p in module.parameters())
    model.release()
    assert sum(p.numel() for p in module.parameters()) < held / 2
    assert all(torch.equal(a, b) for a, b in zip(ragged(model, TEXTS), before, strict=True))


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
