"""Tests of the kernels, which `test_kernels.py` runs in a process of its own: in Triton's
interpreter, or compiled on a CUDA device.

The interpreter computes a block by NumPy. So equality to the bit says there that tiles, blocks and
orders depend on no other token; on a device it says all. Products of NumPy depend on a row's place
in the block, so here they are rounded from float64.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.cuda import kernels, packing, reference
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from draftwell.serving.runtime.models.cuda.reference import split
from tests.support.models.lean_families import lean_family
from tests.support.models.llama_shapes import llama, random_tokens

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding's numbers are any
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = {torch.float32: 1e-4} | ({} if DEVICE == "cpu" else {torch.bfloat16: 1e-3})
"""The interpreter multiplies no bfloat16."""
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPE = Architecture(3, 1, 24, 24**-0.5, 1e-5, "silu", (None,), (None,))
TREE = (-1, 0, 1, 1, 0, 4, 2)
ROWS = [(500, 3, None), (0, 9, None), (300, len(TREE), TREE), (255, 1, None)]
"""Start, tokens and parents of the rows of a pass, each in the slot of its number."""


@pytest.fixture(autouse=True)
def _products_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def dot(self: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def test_products_of_rows_alone_and_among_others() -> None:
    torch.manual_seed(0)
    for dtype, tolerance in DTYPES.items():
        by = split(torch.randn(100, 500, device=DEVICE).to(dtype))
        assert by.splits > 1
        x = torch.randn(144, 500, device=DEVICE).to(dtype)
        for tokens, live in ((16, 3), (32, 17), (128, 65)):
            count = torch.tensor([live], dtype=torch.int32, device=DEVICE)
            found = kernels.product(x[:tokens], by, count)[:, :live]
            wanted = reference.product(x[:live], by, count)
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
            for row in {0, live // 2, live - 1}:
                alone = kernels.product(x[row : row + 16], by, count)[:, 0]
                assert torch.equal(found[:, row], alone), (dtype, tokens, row)


def packed(rows: list[int]) -> torch.Tensor:
    """The fields of a pass of some of `ROWS`."""
    commands, placed = [], []
    for slot in rows:
        start, count, parents = ROWS[slot]
        commands.append(Forward("target", slot, (0,) * count, parents=parents))
        placed.append((slot, start, count))
    sharing = kernels.sharing(SHAPE.groups)
    ((fields, _),) = packing.passes(*packing.pack(commands, placed), 512, sharing, 5)
    return torch.from_numpy(fields).to(DEVICE)


def inputs() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Queries of the tokens of `ROWS`, and keys and values of six slots of 600 positions."""
    torch.manual_seed(0)
    query, *memory = (
        torch.randn(size, device=DEVICE) for size in ((32, 3, 24), (6, 1, 600, 24), (6, 1, 600, 24))
    )
    return query, (memory[0], memory[1])


@pytest.mark.parametrize(("window", "cap"), [(None, None), (70, 5.0)])
def test_attention_of_rows_alone_and_among_others(window: int | None, cap: float | None) -> None:
    shape = replace(SHAPE, windows=(window,), attention_softcap=cap)
    query, memory = inputs()
    counts = [count for _, count, _ in ROWS]
    found = kernels.attend(query, memory, packed([0, 1, 2, 3]), shape, window)
    wanted = reference.attend(query, memory, packed([0, 1, 2, 3]), shape, window)
    total = sum(counts)
    torch.testing.assert_close(found[:total], wanted[:total], atol=1e-5, rtol=1e-4)
    for slot, (own, expected) in enumerate(
        zip(query[:total].split(counts), found[:total].split(counts), strict=True)
    ):
        fields = packed([slot])
        first = torch.zeros(fields.shape[1], 3, 24, device=DEVICE)
        first[: len(own)] = own
        alone = kernels.attend(first, memory, fields, shape, window)[: len(own)]
        assert torch.equal(alone, expected), slot


def test_a_trees_path_is_attended_to_as_the_chain_that_it_is() -> None:
    query, memory = inputs()
    query = query[:16].contiguous()
    tree = kernels.attend(query, memory, packed([2]), SHAPE, None)
    for path in ((0, 1, 2, 6), (0, 4, 5), (0, 1, 3)):
        for whole in memory:
            whole[4] = whole[2]
            whole[4, :, 300 : 300 + len(path)] = whole[2][:, [300 + place for place in path]]
        row = Forward("target", 4, (0,) * len(path))
        ((fields, _),) = packing.passes(
            *packing.pack([row], [(4, 300, len(path))]), 512, kernels.sharing(3), 5
        )
        own = query.clone()
        own[: len(path)] = query[list(path)]
        chain = kernels.attend(own, memory, torch.from_numpy(fields).to(DEVICE), SHAPE, None)
        assert torch.equal(chain[: len(path)], tree[list(path)])


def test_the_first_of_the_largest_is_chosen_and_the_pass_brought_to_it() -> None:
    logits = torch.randn(16, 9001, device=DEVICE)
    logits[0, [8209, 17, 8999]] = 9.0
    logits[1, 8200] = 9.0
    ids = torch.arange(9001, device=DEVICE) + 5
    for tokens, first in ((None, 17), (ids, 22)):
        fields = torch.ones(packing.FIELDS, 16, dtype=torch.int32, device=DEVICE)
        fields[packing.LIVE, 1] = 2
        kernels.choose(logits[:, :9000], fields, tokens)
        assert fields[packing.ID, :2].tolist() == [first, first + 8183]
        for field in (packing.POSITION, packing.PLACE):
            assert fields[field].tolist() == [2, 2, *[1] * 14]


@pytest.mark.parametrize("name", ["llama with biases", "gemma2", "qwen3"])
def test_a_model_of_kernels_equals_that_of_torch(name: str) -> None:
    module = lean_family(name).to(DEVICE)
    found = []
    for ops in (reference, kernels):
        model = CudaLlama(module, slots=2, ops=ops)
        assert model.exact is (ops is kernels)
        model.captures = False  # nobody captures what torch computes
        rows = [
            Forward("target", model.open(), random_tokens(9), 9),
            Forward("target", model.open(), random_tokens(5), 5, parents=(-1, 0, 0, 2, 1)),
        ]
        found.append([output.logits for output in model.forward(rows)])
    for mine, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_logits_in_any_company(dtype: torch.dtype) -> None:
    """Token by token; as a prompt; behind other rows; on a path of a tree."""
    model = CudaLlama(llama(dtype, **SMALL).to(DEVICE), slots=3, ops=kernels)
    text = random_tokens(12)

    def read(slot: int, *tokens: int, keep: int = 1) -> torch.Tensor:
        return model.forward([Forward("target", slot, tokens, keep)])[0].logits

    slots = [model.open() for _ in range(3)]
    prompt = read(slots[0], *text, keep=12)
    for place in (0, 1):
        assert torch.equal(read(slots[1], text[place])[0], prompt[place])
    rows = [
        Forward("target", slots[2], random_tokens(9, seed=1), 1),
        Forward("target", slots[1], text[2:], 10),
    ]
    assert torch.equal(model.forward(rows)[1].logits, prompt[2:])
    model.rollback(slots[1], 8)
    tree = Forward("target", slots[1], (text[8], 3, text[9], text[10]), 4, parents=(-1, 0, 0, 2))
    found = model.forward([tree])[0].logits
    assert torch.equal(found[[0, 2, 3]], prompt[8:11])
    model.keep(slots[1], 8, [0, 2])
    assert torch.equal(read(slots[1], *text[10:], keep=2), prompt[10:])


def test_nothing_is_written_beside_what_is_read() -> None:
    model = CudaLlama(llama(**SMALL).to(DEVICE), slots=3, ops=kernels)
    for _ in range(3):
        model.open()
    model.slots.whole.normal_()
    model.slots.lengths[1:3] = [70, 5]
    before = model.slots.whole.clone()
    model.forward([Forward("target", 1, random_tokens(3)), Forward("target", 2, random_tokens(2))])
    changed = (before != model.slots.whole).any(-1).any(3).any(0).any(0)
    places = {(int(slot), int(place)) for slot, place in changed.nonzero()}
    wanted = {(1, 70), (1, 71), (1, 72), (2, 5), (2, 6)}
    assert {at for at in places if at[0] != model.slots.scratch} == wanted
