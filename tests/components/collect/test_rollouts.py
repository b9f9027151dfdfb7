"""Branches: the packed forward pass equals feeding every prefix and its branch separately, family
by family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from draftwell.components.collect.rollouts import SlowBranches, TransformersBranches, branches
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from tests.support.models.by_library import by_library, compiles
from tests.support.models.tiny import VOCAB, llama, table_pair


def gemma2() -> Any:
    """Sliding windows on every other layer, and soft caps."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=4,
        query_pre_attn_scalar=8,
        initializer_range=0.3,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=6.0,
    )
    return Gemma2ForCausalLM(config).eval()


def gpt2() -> Any:
    """Learned positions, one key head for each query head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()


def read(model: TransformersModel, ids: list[int]) -> int:
    slot = model.open()
    model.forward([Forward("draft", slot, tuple(ids), prefill=True)])
    return slot


def lean() -> LeanLlama:
    """As pairs are loaded: its module can no longer run."""
    model = LeanLlama(copy.deepcopy(llama(2)), slots=2, max_context=48)
    model.release()
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: TransformersModel(llama(2), slots=2, max_context=48),
        lean,
        lambda: TransformersModel(gemma2(), slots=2, max_context=48),
        lambda: TransformersModel(gpt2(), slots=2, max_context=48),
    ],
    ids=["llama-gqa", "lean llama", "gemma2-window-softcap", "gpt2"],
)
def test_packed_branches_equal_separate_ones(make: Any) -> None:
    model = make()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (20,), generator=generator).tolist()
    starts = [1, 7, 8, 13, 19, 20]  # a first token alone, neighbours, and the whole text
    slot = read(model, ids)
    other = read(model, ids[::-1])  # the content of the other slot must not matter
    fast = branches(model, slot, ids, starts, depth=5)
    slow = SlowBranches(model, other, ids, starts)
    assert isinstance(fast, TransformersBranches)
    for _ in range(5):
        tokens = torch.randint(3, VOCAB, (len(starts),), generator=generator).tolist()
        mine, reference = fast.step(tokens), slow.step(tokens)
        torch.testing.assert_close(mine.logits, reference.logits, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(mine.states, reference.states, atol=2e-5, rtol=1e-4)


def test_branches_of_a_reduced_head_say_nothing_about_other_tokens() -> None:
    head = torch.tensor([3, 5, 9])
    model = TransformersModel(llama(2), slots=2, max_context=48, head_tokens=head)
    ids = [5, 9, 4, 11]
    outputs = [
        branches(model, read(model, ids), ids, [2, 4], depth=1).step([7, 8]),
        SlowBranches(model, read(model, ids), ids, [2, 4]).step([7, 8]),
    ]
    for output in outputs:
        assert output.values.shape == (2, 3)
        assert output.logits.isfinite().nonzero()[:, 1].tolist() == [3, 5, 9] * 2
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, atol=2e-5, rtol=1e-4)


def test_branches_leave_the_slot_as_it_was() -> None:
    model = TransformersModel(llama(2), slots=1)
    ids = [5, 9, 4, 11]
    slot = read(model, ids)
    branches(model, slot, ids, [2, 4], depth=3).step([7, 8])
    [after] = model.forward([Forward("draft", slot, (6,))])
    [alone] = model.forward([Forward("draft", read_again(model, slot, ids), (6,))])
    torch.testing.assert_close(after.logits, alone.logits)


def read_again(model: TransformersModel, slot: int, ids: list[int]) -> int:
    model.close(slot)
    return read(model, ids)


def test_other_models_take_the_slow_path() -> None:
    model = table_pair().models["draft"]
    slot = model.open()
    model.forward([Forward("draft", slot, (3, 4, 5))])
    branch = branches(model, slot, [3, 4, 5], [1, 3], depth=2)
    assert isinstance(branch, SlowBranches)
    branch.step([8, 9])
    logits = branch.step([10, 11]).logits
    assert torch.equal(logits[0], model.next_logits([3, 8, 10]))
    assert torch.equal(logits[1], model.next_logits([3, 4, 5, 9, 11]))


@compiles
def test_branches_in_bfloat16_read_the_librarys_products() -> None:
    """As a draft of a pair is loaded on a CPU."""
    model = by_library(copy.deepcopy(llama(2)).bfloat16(), slots=2, max_context=48)
    model.release()
    ids = list(range(3, 15))
    slot, starts = read(model, ids), [4, 7, 12]
    packed = TransformersBranches(model, slot, starts, 3)
    slow = SlowBranches(model, model.open(), ids, starts)
    for tokens in ([5, 6, 7], [8, 9, 10]):
        found, wanted = packed.step(tokens).logits, slow.step(tokens).logits
        torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.1)
