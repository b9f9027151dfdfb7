"""Which slot a request gets, what it holds then, and that every kind of model goes on from it as
though it had read it itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from draftwell.serving.runtime.models.eagle3_model import head_of
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.onnx.onnx_export import export_llama
from draftwell.serving.runtime.models.onnx.onnx_model import OnnxModel
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.models.unbatched_model import UnbatchedModel
from draftwell.serving.runtime.pair import over_slots
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.slot_texts import SlotText, SlotTexts, common_prefix
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.by_library import by_library
from tests.support.models.heads import random_eagle3
from tests.support.models.lean_families import lean_family
from tests.support.models.table_model import TableModel
from tests.support.models.tiny import llama
from tests.support.models.unbatched_families import module_of

TEXT = [3 + (5 * i * i + i) % 17 for i in range(24)]


def slots_of(count: int = 3) -> Slots:
    return Slots([(1, 4)], count, 64, torch.float32, torch.device("cpu"))


def used(slots: Slots, tokens: list[int], owner: str = "one") -> tuple[int, int]:
    """A request that reads its prompt and ends: its slot, and how much of the prompt that held."""
    slot = slots.open(text := SlotText(owner), tokens)
    held = slots.lengths[slot]
    slots.reserve(slot, len(tokens) - held)
    text.extend(held, tokens[held:])
    slots.close(slot)
    return slot, held


@pytest.mark.parametrize(("one", "other"), [(63, 200), (64, 200), (65, 65), (128, 128), (0, 5)])
def test_common_prefixes_of_all_lengths(one: int, other: int) -> None:
    assert common_prefix(list(range(one)), list(range(other))) == min(one, other)
    for place in {0, one // 2, one - 1} & set(range(one)):
        changed = [-1 if i == place else i for i in range(other)]
        assert common_prefix(list(range(one)), changed) == place


def test_the_slot_with_the_longest_common_prefix_is_taken_whatever_came_later() -> None:
    slots = slots_of()
    first, second = used(slots, TEXT)[0], used(slots, [9, *TEXT])[0]
    assert first != second
    assert used(slots, [*TEXT, 5, 6]) == (first, len(TEXT))
    assert used(slots, [9, *TEXT, 4]) == (second, len(TEXT) + 1)


def test_an_empty_slot_comes_first_then_the_one_that_has_been_free_for_longest() -> None:
    slots = slots_of()
    order = [used(slots, [token] * 10)[0] for token in (1, 2, 3, 4, 5)]
    assert sorted(order[:3]) == [0, 1, 2]
    assert order[3:] == order[:2]
    assert used(slots, [3] * 12) == (order[2], 10), "the third text is still there"


def test_the_last_token_of_a_prompt_is_always_read_again() -> None:
    slots = slots_of()
    used(slots, TEXT)
    assert used(slots, TEXT)[1] == len(TEXT) - 1
    assert used(slots, TEXT[:5])[1] == 0, "most of the text would be lost"
    one = slots_of(1)
    used(one, TEXT)
    assert used(one, TEXT[:5])[1] == 4, "there is no other slot"


@pytest.mark.parametrize("owner", ["two", None])
def test_an_owner_never_gets_what_another_left(owner: str | None) -> None:
    slots = slots_of(1)
    used(slots, TEXT)
    slot = slots.open(text := SlotText(owner), TEXT)
    assert (slots.lengths[slot], text.tokens) == (0, [])
    assert not slots.keys[0].any()
    slots.close(slot)
    assert used(slots, TEXT)[1] == 0, "and it is gone for the first one too"


def test_what_nobody_owns_is_not_kept_and_nothing_is_listed_twice() -> None:
    slots = slots_of(1)
    slot = slots.open()
    slots.close(slot)
    assert slot not in slots.texts
    slot = slots.open(text := SlotText("one"), TEXT)
    text.extend(1, [5])
    assert text.tokens == [], "the token before it is not known"
    text.extend(0, [5, 6, 7])
    slots.reserve(slot, 2)
    slots.close(slot)
    assert slots.texts[slot].tokens == [5, 6], "never more than the slot is long"
    assert SlotTexts().longest("one", TEXT) == (-1, 0)


def test_what_lies_after_the_part_that_is_taken_over_is_wiped() -> None:
    """0 · NaN is NaN: what went wrong after it must not reach the next request."""
    slots = slots_of(1)
    slot = slots.open(text := SlotText("one"), TEXT)
    slots.reserve(slot, len(TEXT))
    slots.keys[0][slot] = 1.0
    slots.keys[0][slot, :, 20:24] = torch.nan
    text.extend(0, TEXT)
    slots.close(slot)
    slot = slots.open(SlotText("one"), [*TEXT[:20], 1])
    assert slots.lengths[slot] == 20
    assert slots.keys[0][slot, :, :20].eq(1.0).all()
    assert not slots.keys[0][slot, :, 20:24].any()


def one_after_another(
    model: Any, owner: str | None, strategy: str = "autoregressive"
) -> list[list[int]]:
    """Two turns, the second again, and two at once that copy."""
    engine, found = Engine({"target": model}), []
    for extra in ([], [4, 9, 5, 7], [4, 9, 5, 7], [8, 6]):
        prompt = [*TEXT, *(found[0] if extra else []), *extra]
        engine.run(
            [
                job := engine.submit(
                    prompt, Sampling(max_tokens=8), build_strategy(strategy), owner=owner
                )
            ]
        )
        found.append(job.output)
    jobs = [
        engine.submit([5, *TEXT], Sampling(max_tokens=8), build_strategy(strategy), owner=owner)
        for _ in range(2)
    ]
    engine.run(jobs)
    found += [job.output for job in jobs]
    assert jobs[1].session.stats.cached_tokens == (len(TEXT) if owner else 0)
    return found


def in_onnx(**settings: Any) -> OnnxModel:
    """A random Llama with heads of 16."""
    import transformers as tf

    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    module = tf.LlamaForCausalLM(config).float().eval()
    return OnnxModel(
        export_llama(module, module.lm_head.weight.detach()).SerializeToString(),
        module,
        max_context=256,
        **settings,
    )


KINDS: dict[str, Callable[[], Any]] = {
    "lean with windows": lambda: over_slots(lean_family("mistral with a window"), slots=3),
    "lean, some layers with windows": lambda: over_slots(lean_family("gemma2"), slots=3),
    "lean with heads of another width": lambda: over_slots(lean_family("qwen3"), slots=3),
    "transformers with windows": lambda: TransformersModel(lean_family("gemma3"), slots=3),
    "int8": lambda: over_slots(lean_family("llama"), slots=3, weights="int8"),
    "compiled": lambda: by_library(llama(2), slots=3),
    "static, as for CUDA graphs": lambda: CudaLlama(llama(2), slots=3),
    "caches of its own with windows": lambda: UnbatchedModel(module_of("gpt_neo"), slots=3),
    "caches of its own": lambda: UnbatchedModel(module_of("bloom"), slots=3),
    "ONNX Runtime": lambda: in_onnx(slots=3),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_model_goes_on_as_though_it_had_read_the_text(kind: str) -> None:
    assert one_after_another(KINDS[kind](), "one") == one_after_another(KINDS[kind](), None)


def test_what_was_read_before_a_head_came_has_no_states_for_it() -> None:
    """Neither what free slots hold nor what a request reads that runs then; the head would draft
    from whatever lies in memory."""
    module = llama(2)
    target = LeanLlama(module, slots=3)
    assert used_by(target, TEXT) == 0
    running = target.open(SlotText("one"), TEXT[:10])
    target.forward([Forward("target", running, tuple(TEXT[:10]))])
    head_of(target, random_eagle3(module, 20)[1])
    target.close(running)
    assert [used_by(target, TEXT), used_by(target, TEXT)] == [0, len(TEXT) - 1]


def test_states_for_a_head_are_copied_with_keys_and_values() -> None:
    module = llama(2)
    target = LeanLlama(module, slots=3)
    artifact = random_eagle3(module, 20)[1]
    head = head_of(target, artifact)
    assert head.slots.count == 3
    one, two = target.open(SlotText("one"), TEXT), target.open(SlotText("one"), TEXT)
    target.forward([Forward("target", one, tuple(TEXT))])
    target.fork(one, two, 20)
    assert torch.equal(target.hidden_states(two, 0, 20), target.hidden_states(one, 0, 20))


def test_a_head_takes_over_the_candidates_of_the_part_that_is_copied_alone() -> None:
    """Else what another answer has read would change what this one drafts."""
    module = llama(2)
    target = LeanLlama(module, slots=3)
    artifact = random_eagle3(module, 4)[1]
    head = head_of(target, artifact)
    outside = [token for token in range(3, 24) if token not in head.seen.covered.tolist()][:8]
    one = head.open(text := SlotText("one"), outside)
    head.forward(
        [
            Forward(
                "head", one, tuple(outside), features=torch.zeros(8, 3 * module.config.hidden_size)
            )
        ]
    )
    text.extend(0, outside)
    two = head.open(SlotText("one"), outside)
    head.fork(one, two, 5)
    assert list(head.seen._seen[two]) == outside[:5]
    head.close(one)
    again = head.open(SlotText("one"), [*outside[:6], 3])
    assert list(head.seen._seen[again]) == outside[:6]


def used_by(model: Any, tokens: list[int]) -> int:
    """As `used`, of a model: how much of the prompt a request found."""
    slot = model.open(text := SlotText("one"), tokens)
    held = model.slots.lengths[slot]
    model.forward([Forward("target", slot, tuple(tokens[held:]))])
    text.extend(held, tokens[held:])
    model.close(slot)
    return held


def test_a_table_is_no_exception() -> None:
    assert used_by(table := TableModel.random(24, 0), TEXT) == 0
    assert used_by(table, TEXT) == len(TEXT) - 1
