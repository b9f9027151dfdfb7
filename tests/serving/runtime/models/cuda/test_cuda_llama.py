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

from draftwell.serving import device as own_device
from draftwell.serving.errors import ContextTooLong, DraftwellError
from draftwell.serving.runtime import pair
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.padding import pad_to, parameter_count
from draftwell.serving.runtime.pair import over_slots
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


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_rows_equal_the_plain_module(shape):
    check_ragged(CudaLlama, llama(**SHAPES[shape]))


def test_a_padded_target_equals_the_plain_module():
    """It has two feed-forwards."""
    plain, padded = llama(), llama()
    pad_to(padded, 2 * parameter_count(padded))
    wanted = ragged(LeanLlama(plain, slots=3), TEXTS)
    for mine, want in zip(ragged(CudaLlama(padded, slots=3), TEXTS), wanted, strict=True):
        torch.testing.assert_close(mine, want, atol=2e-5, rtol=0)


def test_every_width_equals_the_ragged_adapters():
    """Passes on both sides of a bucket's edge, with a rejected draft before each."""
    module = llama()
    models = LeanLlama(copy.deepcopy(module)), CudaLlama(module)
    slots = [model.open() for model in models]
    for context in (1, 30, 63, 64, 65):
        for width in (1, 2, 5, 16, 17, 33):
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
    lean, static = LeanLlama(module, slots=2), CudaLlama(module, slots=2, chunk=64)
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


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 32])
def test_padding_writes_to_the_scratch_slot_only(rows, tokens):
    """Every position of every slot but those that the rows name stays bit for bit what it was."""
    model = CudaLlama(llama(), slots=8)
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


PAIR = LeanLlama(llama(), slots=3), CudaLlama(llama(), slots=3)


def test_branches_beyond_the_memory_move_all_slots_into_larger_tensors():
    model = CudaLlama(llama(), slots=1)
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
    model = CudaLlama(llama(), slots=2)
    first, second = model.open(), model.open()
    want = feed(model, first, 3, 1, 4).logits
    feed(model, second, *random_tokens(20))
    for layer in [*model.slots.keys, *model.slots.values]:
        layer[second] = float("nan")
    model.close(second)
    second = model.open()
    torch.testing.assert_close(feed(model, second, 3, 1, 4).logits, want)


def test_a_failed_forward_leaves_slots_as_they_were():
    model = CudaLlama(llama(), slots=2, max_context=8)
    a, b = model.open(), model.open()
    model.forward([Forward("target", a, (1, 2)), Forward("target", b, (1, 2, 3))])
    for bad in (Forward("target", b, (1,) * 6), Forward("target", b, (1,) * 5, steps=2)):
        with pytest.raises(ContextTooLong):
            model.forward([Forward("target", a, (4,)), bad])
        assert [model.slots.lengths[slot] for slot in (a, b)] == [2, 3]


@pytest.mark.parametrize("head", [None, [1, 5, 60]])
def test_a_chain_is_greedy_drafting_token_by_token(head):
    """Beside rows of other lengths; slots end where single steps leave them."""
    model = CudaLlama(llama(), slots=4, head_tokens=None if head is None else torch.tensor(head))
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
    model = CudaLlama(
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


def test_over_slots_takes_the_cuda_path_on_cuda_or_when_asked():
    module = llama()
    assert type(over_slots(module)) is LeanLlama
    assert type(over_slots(module, static=True)) is CudaLlama
    assert type(over_slots(module, static=False)) is LeanLlama
    assert not CudaLlama(module).exact, "torch promises nothing"


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("", ""),
        ("triton", "Triton is not installed"),
        ("compiler", "no C compiler"),
        ("ampere", "older than Ampere"),
    ],
)
def test_a_device_that_runs_no_kernels_is_said_to_be_slower(lacks, said, monkeypatch, caplog):
    module = llama()
    monkeypatch.setattr(type(module), "device", torch.device("cuda"), raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(
        own_device, "find_spec", lambda name: None if lacks == "triton" else object()
    )
    monkeypatch.setattr(own_device, "which", lambda name: None if lacks == "compiler" else name)
    capability = (7, 5) if lacks == "ampere" else (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for kind in ("CudaLlama", "LeanLlama"):
        monkeypatch.setattr(pair, kind, lambda module, kind=kind, **settings: kind)
    assert over_slots(module) == ("LeanLlama" if lacks else "CudaLlama")
    assert said in caplog.text
    assert bool(caplog.text) is bool(lacks)


def test_attention_that_comes_back_in_another_layout_is_read_right(monkeypatch):
    """CUDA's kernels give [rows, tokens, heads, dim] transposed, the CPU's do not."""
    plain = ragged(LeanLlama(llama(), slots=3), TEXTS)
    attention = torch.nn.functional.scaled_dot_product_attention

    def transposed(*arguments, **named):
        return attention(*arguments, **named).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", transposed)
    for mine, want in zip(ragged(LeanLlama(llama(), slots=3), TEXTS), plain, strict=True):
        torch.testing.assert_close(mine, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("unread", [1, 7, 20])
def test_a_tree_behind_unread_text_may_be_cut_anywhere(unread):
    """Its first tokens follow each other as text does; the passes are of 16 tokens."""
    parents = (*range(-1, unread - 1), *(unread - 1 + i for i in (0, 0, 1, 1, 2, 5, 6, 6, 0, 9)))
    tokens, prompt = random_tokens(len(parents), seed=3), random_tokens(9)
    found = []
    for model in (LeanLlama(llama(), slots=2), CudaLlama(llama(), slots=2, chunk=16)):
        model.keep_hidden_states((0, 1))
        slots = [model.open() for _ in range(2)]
        for slot in slots:
            feed(model, slot, *prompt)
        rows = [
            Forward("target", slots[0], prompt[:3], 2),
            Forward("target", slots[1], tokens, 11, parents=parents),
        ]
        outputs = model.forward(rows)
        path = [*range(unread), unread + 1, unread + 4]
        model.keep(slots[1], 9, path)
        found.append(
            [
                *(output.logits for output in outputs),
                feed(model, slots[1], 5).logits,
                model.hidden_states(slots[1], 0, 9 + len(path) + 1),
            ]
        )
    for mine, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, want, atol=2e-5, rtol=0)


def test_a_tree_that_is_too_deep_is_refused():
    """A chain is no tree, however long."""
    model = CudaLlama(llama(), slots=1)
    slot = model.open()
    feed(model, slot, 3)
    deep = (-1, *range(70), 0)
    with pytest.raises(DraftwellError) as refused:
        model.forward([Forward("target", slot, random_tokens(72), parents=deep)])
    assert refused.value.code == "tree_too_deep"
    assert model.slots.lengths[slot] == 1
    model.forward([Forward("target", slot, random_tokens(71), parents=deep[:-1])])


class TestOnADevice:
    pytestmark = gpu

    def test_static_equals_the_cpu(self):
        outputs = [
            ragged(CudaLlama(llama().to(device), slots=3), TEXTS) for device in ("cpu", "cuda")
        ]
        for mine, want in zip(outputs[1], outputs[0], strict=True):
            torch.testing.assert_close(mine.cpu(), want, atol=1e-4, rtol=0)

    def test_replay_equals_eager(self):
        replayed, eager = (CudaLlama(llama().cuda(), slots=3) for _ in range(2))
        eager.captures = False
        for model in (replayed, eager):
            model.keep_hidden_states((0, 1))
        for _ in range(3):
            outputs = [
                [*ragged(model, TEXTS), model.hidden_states(0, 0, 6)] for model in (replayed, eager)
            ]
            for mine, want in zip(*outputs, strict=True):
                assert torch.equal(mine, want)
            for model in (replayed, eager):
                for slot in range(3):
                    model.close(slot)
        assert replayed._graphs
        assert not eager._graphs

    def test_a_chain_equals_the_cpus(self):
        outputs = []
        for device in ("cpu", "cuda"):
            model = CudaLlama(llama().to(device), slots=2)
            outputs.append(feed(model, model.open(), 3, 1, 4, steps=6).logits.cpu())
        torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=0)

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch's, about itself
    def test_a_forward_does_not_synchronise(self):
        model = CudaLlama(llama().cuda(), slots=2)
        model.warm_up()
        a, b = model.open(), model.open()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = model.forward(
                [Forward("target", a, random_tokens(40)), Forward("target", b, (1, 2), steps=4)]
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert bool(torch.isfinite(outputs[1].logits).all())
