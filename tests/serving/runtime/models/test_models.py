"""Slots and the transformers adapter: ragged batches and rollbacks equal the plain model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.modeling_outputs import MoeModelOutputWithPast

from draftwell.serving.errors import ContextTooLong, DraftwellError
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.models.unbatched_model import UnbatchedModel
from draftwell.serving.runtime.pair import over_slots
from tests.support.errors import raises_code
from tests.support.models.llama_shapes import SIZES, check_ragged
from tests.support.models.unbatched_families import module_of

SHARP = SIZES | {"initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SCALED = ["cohere", "cohere2", "granite", "granitemoe", "granitemoeshared"]


def family(name: str):
    """A tiny random model of a family, float32."""
    import transformers as tf

    torch.manual_seed(0)
    config = {
        "llama": lambda: tf.LlamaConfig(**SIZES),
        "qwen2": lambda: tf.Qwen2Config(**SIZES),
        "qwen3": lambda: tf.Qwen3Config(**SIZES, head_dim=8),
        "gemma2": lambda: tf.Gemma2Config(
            **SIZES, head_dim=8, sliding_window=6, query_pre_attn_scalar=8
        ),
        "gemma3": lambda: tf.Gemma3TextConfig(
            **SIZES, head_dim=8, sliding_window=6, query_pre_attn_scalar=8
        ),
        "gpt_neox": lambda: tf.GPTNeoXConfig(
            **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
        ),
        "gpt2": lambda: tf.GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128
        ),
        "cohere": lambda: tf.CohereConfig(**SHARP, logit_scale=0.3),
        "cohere2": lambda: tf.Cohere2Config(**SHARP, logit_scale=0.3, sliding_window=6),
        "granite": lambda: tf.GraniteConfig(
            **SHARP,
            logits_scaling=3.0,
            embedding_multiplier=2.0,
            attention_multiplier=0.4,
            residual_multiplier=0.7,
        ),
        "granitemoe": lambda: tf.GraniteMoeConfig(
            **SHARP, logits_scaling=3.0, num_local_experts=4, num_experts_per_tok=2
        ),
        "granitemoeshared": lambda: tf.GraniteMoeSharedConfig(
            **SHARP,
            logits_scaling=3.0,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=16,
        ),
    }[name]()
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox", "gpt2", *SCALED]
)
def test_ragged_slots_equal_the_plain_model(name):
    check_ragged(TransformersModel, family(name))


def test_models_that_would_give_wrong_numbers_are_refused():
    import transformers as tf

    neo = tf.GPTNeoConfig(
        vocab_size=61,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
    )
    with raises_code("unsupported_architecture", "gpt_neo", "compared"):
        TransformersModel(tf.AutoModelForCausalLM.from_config(neo))
    for adapter in (TransformersModel, over_slots):
        with raises_code("unsupported_architecture", "llama", "logits_scaling"):
            adapter(
                tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SIZES, logits_scaling=4.0))
            )
    sinks = tf.GptOssConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    with raises_code("unsupported_architecture", "gpt_oss", "compared"):
        TransformersModel(tf.AutoModelForCausalLM.from_config(sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCALED)
def test_logits_are_scaled_as_the_module_scales_them(name, dtype):
    """Bit for bit, from the same hidden states, and otherwise than the bare head."""
    module = family(name).to(dtype)
    states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    model = TransformersModel(module)
    module.base_model.forward = lambda *args, **kwargs: MoeModelOutputWithPast(
        last_hidden_state=states
    )
    with torch.no_grad():
        expected = module(torch.tensor([[1, 2, 3, 4, 5]]), use_cache=False).logits[0]
        assert torch.equal(model.compact_logits(states[0]), expected.float())
        assert not torch.allclose(
            model.compact_logits(states[0]),
            module.get_output_embeddings()(states[0]).float(),
            atol=0.1,
        )


@pytest.mark.parametrize(
    ("adapter", "make", "name"),
    [
        (TransformersModel, family, "llama"),
        (TransformersModel, family, "granite"),
        (UnbatchedModel, module_of, "gptj"),
    ],
    ids=["plain", "scaled", "with a bias"],
)
def test_a_reduced_head_is_the_full_one_elsewhere_minus_infinity(adapter, make, name):
    module, head = make(name), torch.tensor([3, 5, 20])
    full, reduced = (
        model.forward([Forward("draft", model.open(), (5, 6, 7), 2)])[0].logits
        for model in (adapter(module, head_tokens=tokens) for tokens in (None, head))
    )
    assert torch.allclose(full[:, head], reduced[:, head], atol=1e-6)
    assert int(torch.isfinite(reduced).sum()) == 2 * 3


def test_a_failed_forward_leaves_slots_as_they_were():
    model = TransformersModel(family("llama"), slots=2, max_context=8)
    a, b = model.open(), model.open()
    model.forward([Forward("target", a, (1, 2)), Forward("target", b, (1, 2, 3))])
    with pytest.raises(ContextTooLong):
        model.forward([Forward("target", a, (4,)), Forward("target", b, (1,) * 6)])
    assert [model.slots.lengths[slot] for slot in (a, b)] == [2, 3]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "close", "feed", "back"]), st.integers(0, 3), st.integers(1, 6)
        ),
        max_size=40,
    )
)
def test_slots_behave_like_a_dictionary_of_lists(steps):
    """Random sequences against a slow reference that keeps every value in a list."""
    slots = Slots(
        [(1, 1)], count=3, max_context=16, dtype=torch.float32, device=torch.device("cpu")
    )
    reference: dict[int, list[float]] = {}
    value = 0.0
    for action, which, n in steps:
        live = sorted(reference)
        if action == "open":
            if len(reference) == 3:
                with pytest.raises(DraftwellError):
                    slots.open()
            else:
                reference[slots.open()] = []
            continue
        if not live:
            continue
        slot = live[which % len(live)]
        if action == "close":
            slots.close(slot)
            del reference[slot]
        elif action == "back":
            keep = max(0, len(reference[slot]) - n)
            slots.rollback(slot, keep)
            del reference[slot][keep:]
        elif len(reference[slot]) + n > 16:
            with pytest.raises(ContextTooLong):
                slots.reserve(slot, n)
        else:
            start = slots.reserve(slot, n)
            new = torch.arange(n, dtype=torch.float32)[None, :, None] + value
            value += n
            keys, _ = slots.write(0, slot, start, new, new)
            reference[slot] += new.flatten().tolist()
            assert keys.flatten().tolist() == reference[slot]
