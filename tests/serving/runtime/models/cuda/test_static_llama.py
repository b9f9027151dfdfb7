"""The CUDA path on a CPU: fixed shapes give what ragged ones give, padding touches nothing, nothing
reads from the device.

Capture and replay of graphs need a CUDA device; their tests are marked `gpu` and say so where they
are skipped.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st

from draftwell.serving.errors import ContextTooLong
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.cuda.static_llama import LONGEST_STEP, Bucket, StaticLlama
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.pair import note_limits, over_slots
from tests.support.models.llama_shapes import (
    SHAPES,
    TEXTS,
    check_ragged,
    llama,
    ragged,
    random_tokens,
)

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device: graphs are captured there only"
    ),
]


def feed(model, slot: int, *tokens: int, keep: int = 0, steps: int = 1):
    return model.forward(
        [Forward("target", slot, tokens, keep or (1 if steps > 1 else len(tokens)), steps=steps)]
    )[0]


def test_what_strategies_lose_is_said_once_in_the_log(caplog):
    note_limits(LeanLlama(llama(), slots=1))
    assert not caplog.records
    target = StaticLlama(llama(), slots=1)
    assert (target.keeps_states, target.trees) == (False, False), "else the line is wrong"
    note_limits(target)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "hybrid drafts without its head" in caplog.text


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_rows_equal_the_plain_module(shape):
    check_ragged(StaticLlama, llama(**SHAPES[shape]))


def test_every_width_equals_the_ragged_adapters():
    """1 to 33 tokens behind contexts that cross a bucket's edge, with a rejected draft before
    each."""
    module = llama()
    models = LeanLlama(copy.deepcopy(module)), StaticLlama(module)
    slots = [model.open() for model in models]
    for context in (1, 30, 63, 64, 65):
        for width in range(1, LONGEST_STEP + 2):
            outputs = []
            for model, slot in zip(models, slots, strict=True):
                model.rollback(slot, 0)
                feed(model, slot, *random_tokens(context), keep=1)
                feed(model, slot, 7, 7, 7)
                model.rollback(slot, context)
                outputs.append(feed(model, slot, *random_tokens(width, seed=1)))
            torch.testing.assert_close(outputs[1].logits, outputs[0].logits, atol=2e-5, rtol=0)
            torch.testing.assert_close(outputs[1].states, outputs[0].states, atol=2e-5, rtol=0)


@pytest.mark.parametrize("length", [63, 64, 65, 96, 97, 127, 128])
@pytest.mark.parametrize("keep", [1, 40, None])
def test_prompts_longer_than_the_largest_bucket_are_read_in_parts(length, keep):
    module, prompt = llama(), random_tokens(length)
    lean, static = LeanLlama(module, slots=2), StaticLlama(module, slots=2, chunk=64)
    outputs = []
    for model in (lean, static):
        a, b = model.open(), model.open()
        outputs.append(
            model.forward(
                [Forward("target", a, prompt, keep or length), Forward("target", b, (1, 2, 3), 2)]
            )
        )
    for mine, theirs in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(mine.logits, theirs.logits, atol=2e-5, rtol=0)
        torch.testing.assert_close(mine.states, theirs.states, atol=2e-5, rtol=0)


def test_buckets():
    model = StaticLlama(llama(), max_context=100)
    assert model.bucket(1, 1, 1) == Bucket(1, 1, 64)
    assert model.bucket(3, 5, 65) == Bucket(4, 8, 100)
    shapes = {
        model.bucket(rows, tokens, end)
        for rows in range(1, 9)
        for tokens in range(1, 33)
        for end in range(tokens, 101)
    }
    assert {s.rows for s in shapes} == {1, 2, 4, 8}
    assert {s.tokens for s in shapes} == {1, 2, 4, 8, 16, 32}
    assert {s.reach for s in shapes} == {64, 100}


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 32])
def test_padding_writes_to_the_scratch_slot_only(rows, tokens):
    """Every position of every slot but those that the rows name stays bit for bit what it was."""
    model = StaticLlama(llama(), slots=8)
    for layer in [*model.slots.keys, *model.slots.values]:
        layer.normal_()
    slots = [model.slots._free.pop() for _ in range(8)][::-1][:rows]
    for number, slot in enumerate(slots):
        model.slots.lengths[slot] = 90 + number
    before = [layer.clone() for layer in [*model.slots.keys, *model.slots.values]]
    model.forward(
        [
            Forward("target", slot, random_tokens(max(1, tokens - number)))
            for number, slot in enumerate(slots)
        ]
    )
    for old, new in zip(before, [*model.slots.keys, *model.slots.values], strict=True):
        changed = {(int(s), int(p)) for s, p in (old != new).any(-1).any(1).nonzero()}
        written = {
            (slot, 90 + n + i) for n, slot in enumerate(slots) for i in range(max(1, tokens - n))
        }
        assert {c for c in changed if c[0] != model.slots.scratch} == written


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["feed", "feed", "back", "fork", "close", "open"]),
            st.integers(0, 2),
            st.integers(1, 40),
        ),
        max_size=12,
    )
)
def test_random_sequences_equal_the_ragged_path(steps):
    """Batches of rows of any length, rollbacks, forks into branches, slots reused: both paths agree
    at every forward."""
    lean, static = PAIR
    lean.slots, static.slots = fresh(lean), fresh(static)
    slots = {i: (lean.open(), static.open()) for i in range(3)}
    for number, (action, which, n) in enumerate(steps):
        lengths = lean.slots.lengths
        if action == "open" and which not in slots:
            slots[which] = (lean.open(), static.open())
        if which not in slots:
            continue
        mine, other = slots[which]
        if action == "close" and which < 3:
            lean.close(mine), static.close(other)
            del slots[which]
        elif action == "back":
            length = max(0, lengths[mine] - n)
            lean.rollback(mine, length), static.rollback(other, length)
        elif action == "fork" and lengths[mine] and len(slots) < 6:
            branch = (lean.open_branch(), static.open_branch())
            lean.fork(mine, branch[0], lengths[mine]), static.fork(other, branch[1], lengths[mine])
            slots[max(3, *slots) + 1] = branch
        elif action == "feed":
            rows = [
                (pair, random_tokens(1 + (n + 7 * i) % 40, seed=number))
                for i, pair in enumerate(slots.values())
            ]
            rows = [
                (pair, tokens) for pair, tokens in rows if lengths[pair[0]] + len(tokens) <= 128
            ]
            if not rows:
                continue
            outputs = [
                model.forward(
                    [Forward("target", pair[side], tokens, len(tokens)) for pair, tokens in rows]
                )
                for side, model in enumerate((lean, static))
            ]
            for one, two in zip(*outputs, strict=True):
                torch.testing.assert_close(two.logits, one.logits, atol=2e-5, rtol=0)


def fresh(model):
    """New slots for a model."""
    old = model.slots
    return type(old)(old._shapes, 3, model.max_context, model.dtype, model.device)


PAIR = LeanLlama(llama(), slots=3), StaticLlama(llama(), slots=3)


def test_branches_beyond_the_memory_move_all_slots_into_larger_tensors():
    model = StaticLlama(llama(), slots=1)
    slot = model.open()
    prompt = feed(model, slot, 3, 1, 4).logits
    want = [feed(model, slot, token) for token in (1, 5, 9)]
    model.rollback(slot, 3)
    branches = [model.open_branch() for _ in range(5)]
    assert len({slot, model.slots.scratch, *branches}) == 7
    for branch in branches:
        model.fork(slot, branch, 3)
    for branch in [slot, *branches]:
        for token, output in zip((1, 5, 9), want, strict=True):
            torch.testing.assert_close(feed(model, branch, token).logits, output.logits)
    model.close(branches[2])
    assert model.open_branch() == branches[2]
    model.close(slot)
    # a slot is wiped in the tensors that have grown, too
    torch.testing.assert_close(feed(model, model.open(), 3, 1, 4).logits, prompt)


def test_nothing_of_a_request_that_went_wrong_reaches_the_next_one():
    """A masked position has weight 0, and 0 · NaN is NaN."""
    model = StaticLlama(llama(), slots=2)
    first, second = model.open(), model.open()
    want = feed(model, first, 3, 1, 4).logits
    feed(model, second, *random_tokens(20))
    for layer in [*model.slots.keys, *model.slots.values]:
        layer[second] = float("nan")
    model.close(second)
    second = model.open()
    torch.testing.assert_close(feed(model, second, 3, 1, 4).logits, want)


def test_a_failed_forward_leaves_slots_as_they_were():
    model = StaticLlama(llama(), slots=2, max_context=8)
    a, b = model.open(), model.open()
    model.forward([Forward("target", a, (1, 2)), Forward("target", b, (1, 2, 3))])
    for bad in (Forward("target", b, (1,) * 6), Forward("target", b, (1,) * 5, steps=2)):
        with pytest.raises(ContextTooLong):
            model.forward([Forward("target", a, (4,)), bad])
        assert [model.slots.lengths[slot] for slot in (a, b)] == [2, 3]


@pytest.mark.parametrize("head", [None, [1, 5, 60]])
def test_a_chain_is_greedy_drafting_token_by_token(head):
    """Beside rows of other lengths; slots end where single steps leave them."""
    model = StaticLlama(llama(), slots=4, head_tokens=None if head is None else torch.tensor(head))
    slots = [model.open() for _ in range(4)]
    starts = [(3, 1, 4), (1,), random_tokens(40), (9, 2)]
    single = []
    for slot, tokens, steps in zip(slots, starts, (5, 5, 3, 1), strict=True):
        outputs = [feed(model, slot, *tokens, keep=1)]
        for _ in range(steps - 1):
            outputs.append(feed(model, slot, int(outputs[-1].logits.argmax())))
        single.append(
            (torch.cat([o.logits for o in outputs]), torch.cat([o.states for o in outputs]))
        )
    lengths = list(model.slots.lengths)
    for slot in slots:
        model.rollback(slot, 0)
    outputs = model.forward(
        [
            Forward("draft", slot, tokens, steps=n)
            for slot, tokens, n in zip(slots, starts, (5, 5, 3, 1), strict=True)
        ]
    )
    for output, (logits, hidden) in zip(outputs, single, strict=True):
        torch.testing.assert_close(output.logits, logits, atol=2e-5, rtol=0)
        torch.testing.assert_close(output.states, hidden, atol=2e-5, rtol=0)
    assert model.slots.lengths == lengths


@pytest.mark.parametrize("head", [None, [1, 5, 60]])
def test_a_forward_reads_nothing_from_the_device(head):
    """Tensors on torch's `meta` device have shapes but no numbers: reading one fails, and so does
    mixing it with a CPU's."""
    model = StaticLlama(
        llama().to("meta"), slots=3, head_tokens=None if head is None else torch.tensor(head)
    )
    slots = [model.open() for _ in range(3)]
    rows = [
        Forward("target", slots[0], random_tokens(40), 3),
        Forward("target", slots[1], (1, 2, 3)),
        Forward("target", slots[2], (4,), steps=4),
    ]
    outputs = model.forward(rows)
    assert [len(o) for o in outputs] == [3, 1, 4]
    assert {o.values.device.type for o in outputs} == {"meta"}
    with pytest.raises(RuntimeError):
        _ = outputs[0].top  # what a read would do


def test_over_slots_takes_the_static_path_on_cuda_or_when_asked():
    module = llama()
    assert type(over_slots(module)) is LeanLlama
    assert type(over_slots(module, static=True)) is StaticLlama
    assert type(over_slots(module, static=False)) is LeanLlama
    assert type(over_slots(llama(attention_bias=True), static=True)) is LeanLlama


def test_attention_that_comes_back_in_another_layout_is_read_right(monkeypatch):
    """CUDA's kernels give [rows, tokens, heads, dim] transposed, the CPU's do not."""
    plain = ragged(StaticLlama(llama(), slots=3), TEXTS)
    attention = torch.nn.functional.scaled_dot_product_attention

    def transposed(*arguments, **named):
        return attention(*arguments, **named).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", transposed)
    for model in (StaticLlama(llama(), slots=3), LeanLlama(llama(), slots=3)):
        for mine, want in zip(ragged(model, TEXTS), plain, strict=True):
            torch.testing.assert_close(mine, want, atol=1e-5, rtol=0)


class TestOnADevice:
    pytestmark = gpu

    def test_static_equals_the_cpu(self):
        outputs = [
            ragged(StaticLlama(llama().to(device), slots=3), TEXTS) for device in ("cpu", "cuda")
        ]
        for mine, want in zip(outputs[1], outputs[0], strict=True):
            torch.testing.assert_close(mine.cpu(), want, atol=1e-4, rtol=0)

    def test_replay_equals_eager(self):
        replayed, eager = (StaticLlama(llama().cuda(), slots=3) for _ in range(2))
        eager.captures = False
        for _ in range(3):
            outputs = [ragged(model, TEXTS) for model in (replayed, eager)]
            for mine, want in zip(*outputs, strict=True):
                torch.testing.assert_close(mine, want, atol=1e-5, rtol=0)
            for model in (replayed, eager):
                for slot in range(3):
                    model.close(slot)
        assert replayed._graphs
        assert not eager._graphs

    def test_a_chain_equals_the_cpus(self):
        outputs = []
        for device in ("cpu", "cuda"):
            model = StaticLlama(llama().to(device), slots=2)
            outputs.append(feed(model, model.open(), 3, 1, 4, steps=6).logits.cpu())
        torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=0)

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch's, about itself
    def test_a_forward_does_not_synchronise(self):
        model = StaticLlama(llama().cuda(), slots=2)
        model.warm_up(rows=2)
        a, b = model.open(), model.open()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = model.forward(
                [Forward("target", a, random_tokens(40)), Forward("target", b, (1, 2), steps=4)]
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert bool(torch.isfinite(outputs[1].logits).all())
