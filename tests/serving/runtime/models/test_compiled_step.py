"""A few tokens by compiled layers equal the eager way; what is compiled is kept, and nothing is
compiled unasked."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from draftwell.serving.artifacts.rounding import quantise
from draftwell.serving.device import lacks_bfloat16
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import WEIGHTS, Weights
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models import (
    compiled_library,
    compiled_step,
    lean_llama,
    row_attention,
)
from draftwell.serving.runtime.models.compiled_layer import (
    AfterAttention,
    BeforeAttention,
    CompiledLayer,
    Head,
    OneRowAttention,
    OneToken,
    RowsAttention,
    packed_layer,
    product,
)
from draftwell.serving.runtime.models.compiled_library import LIBRARY, key, library, load
from draftwell.serving.runtime.models.compiled_step import (
    FORMS,
    LONGEST_BESIDE,
    LONGEST_ROW,
    Compile,
    CompiledHalves,
    CompiledRow,
    CompiledRows,
    Form,
    few_drafts,
)
from draftwell.serving.runtime.models.lean_layer import layer_weights
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.packed_matmul import OUTPUTS, packed, unpacked
from draftwell.serving.runtime.models.row_kernel import fits
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from tests.support.errors import raises_code
from tests.support.models.lean_families import CONFIGS, lean_family
from tests.support.models.llama_shapes import (
    check_ends,
    llama,
    plain_logits,
    random_tokens,
    read_starts,
)
from tests.support.models.other_processors import compiles
from tests.support.models.uncompiled import with_step

ROUNDED = pytest.mark.skipif(
    lacks_bfloat16(), reason="this processor multiplies by no rounded weights"
)
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""int4 takes inputs in multiples of 32."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for all that is compiled."""
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path


def started(compiled: Compile) -> LeanLlama:
    """A model of bfloat16, whose layers may be compiled."""
    return LeanLlama(llama(torch.bfloat16), compiled=compiled)


def whole_layer(model: LeanLlama) -> dict[str, torch.Tensor]:
    """What a library of the first layer reads."""
    return packed_layer(layer_weights(model.layers[0], model.module.model.layers[0]))


class UncompiledPart:
    """What a library of a part of a layer computes, by torch; says when it is called.

    Args:
        groups: of how many tensors its arguments but the last consist; that is all others, or there
            is none if `rest` is False.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        groups: Sequence[int],
        called: Callable[[], None],
        *,
        rest: bool = True,
    ):
        self.module, self.groups, self.called, self.rest = module, groups, called, rest

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.called()
        assert all(one.is_contiguous() for one in inputs), "a library would read on as if they were"
        arguments: list[Any] = []
        for count in self.groups:
            arguments.append(tuple(inputs[:count]))
            inputs = inputs[count:]
        found = self.module(*arguments, *([inputs] if self.rest else []))
        return list(found) if isinstance(found, tuple) else [found]


def with_parts(model: LeanLlama) -> Counter[str]:
    """Give the step of a model compiled parts of layers, less the compiler; returns their calls, by
    kind."""
    called: Counter[str] = Counter()
    assert model.step is not None
    halves = []
    for own, layer in zip(model.layers, model.module.model.layers, strict=True):
        weights = layer_weights(own, layer)
        pair = [
            (
                UncompiledPart(
                    half(own, list(half.share(weights))),
                    [states],
                    partial(called.update, [half.__name__]),
                ),
                list(half.share(weights).values()),
            )
            for half, states in ((BeforeAttention, 3), (AfterAttention, 2))
        ]
        halves.append(CompiledHalves(pair[0], pair[1]))
    model.step.halves = halves
    rows = [
        UncompiledPart(
            RowsAttention(model.shape, window),
            [3, 2, 3],
            partial(called.update, ["rows"]),
            rest=False,
        )
        for window in model.shape.windows
    ]
    row = UncompiledPart(
        OneRowAttention(model.shape), [3, 2, 2], partial(called.update, ["row"]), rest=False
    )
    model.step.parts = row_attention.CompiledParts(
        partial(CompiledRows, rows, model.slots),
        partial(CompiledRow, row, model.shape.windows, model.slots),
    )
    return called


@pytest.mark.parametrize("name", CONFIGS)
def test_single_tokens_between_drafts_and_rollbacks_equal_the_plain_module(name: str) -> None:
    module = lean_family(name)
    text = random_tokens(14, 3)
    model = LeanLlama(module, slots=3)
    called = with_step(model)
    other, slot = model.open(), model.open()
    model.forward([Forward("target", other, random_tokens(20, 9))])
    model.forward([Forward("target", slot, text[:4]), Forward("target", other, (1,))])
    model.forward([Forward("target", slot, (9, 9, 9))])
    model.rollback(slot, 4)
    logits = [model.forward([Forward("target", slot, (token,))])[0].logits for token in text[4:12]]
    logits.append(model.forward([Forward("target", slot, text[12:], 2)])[0].logits)
    torch.testing.assert_close(torch.cat(logits), plain_logits(module, text)[4:], atol=1e-4, rtol=0)
    # the first four tokens stand beside the other row's one; a draft of three and the last two are
    # one row
    assert called == {
        form: calls * module.config.num_hidden_layers
        for form, calls in (("token", 8), ("row", 2), ("rows", 1))
    }


@ROUNDED
@pytest.mark.parametrize("weights", WEIGHTS)
def test_few_tokens_read_rounded_weights_as_the_eager_way_does(weights: Weights) -> None:
    """And as many as the eager way takes the wide copy for are left to it."""
    sizes = {**WIDE, "initializer_range": 0.1}
    model, full = (
        LeanLlama(llama(torch.bfloat16, **sizes), weights=each, slots=2) for each in (weights, None)
    )
    text = random_tokens(14, 4)

    def say(one: LeanLlama) -> torch.Tensor:
        slot = one.open()
        parts = [
            one.forward([Forward("target", slot, part, len(part))])[0].logits
            for part in (text[:1], text[1:2], text[2:5], text[5:])
        ]
        return torch.cat(parts)

    expected, other = say(model), say(full)
    read = layer_weights(model.layers[0], model.module.model.layers[0])
    assert read["down0"].dtype == {"int8": torch.int8, "int4": torch.uint8}[weights]
    called = with_step(model, forms=("token",) if weights == "int8" else ("token", "row"), most=8)
    found = say(model)
    assert called == ({"token": 4} if weights == "int8" else {"token": 4, "row": 2})
    assert (found - expected).abs().mean() < (other - expected).abs().mean() / 2


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 1, LONGEST_BESIDE, 2)], ids=["tokens", "drafts"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_beside_each_other_equal_the_plain_module(name: str, counts: tuple[int, ...]) -> None:
    """In one call a layer, after texts of other lengths and rejected tokens, in any order of slots,
    with one between them that is not run."""
    module = lean_family(name)
    texts = [random_tokens(5 + 3 * i + count, i) for i, count in enumerate(counts)]
    model = LeanLlama(module, slots=5)
    slots = [model.open() for _ in range(len(counts) + 1)]
    model.forward([Forward("target", slots.pop(1), random_tokens(17, 8))])
    slots.reverse()
    for slot, text, count in zip(slots, texts, counts, strict=True):
        model.forward([Forward("target", slot, (*text[:-count], 9, 9))])
        model.rollback(slot, len(text) - count)
    called = with_step(model)
    check_ends(model, module, slots, texts, counts)
    assert called == {"rows": module.config.num_hidden_layers}


def test_a_tree_or_a_row_of_many_tokens_beside_others_is_left_to_the_eager_way() -> None:
    model = LeanLlama(lean_family("llama"), slots=2)
    one, other = read_starts(model, [random_tokens(9)] * 2, [1, 1])
    called = with_step(model)
    for row in (
        Forward("target", one, (5, 6, 7), 3, parents=(-1, 0, 0)),
        Forward("target", one, random_tokens(LONGEST_BESIDE + 1, 3)),
    ):
        model.forward([row, Forward("target", other, (4,))])
    assert not called


def test_many_drafts_or_drafts_after_long_texts_are_not_read_token_by_token() -> None:
    assert few_drafts([(slot, 300, 4) for slot in range(8)])
    assert not few_drafts([(slot, 300, 4) for slot in range(9)])
    assert not few_drafts([(slot, 3000, 8) for slot in range(4)])


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_several_lengths_equal_the_plain_module(name: str) -> None:
    module = lean_family(name)
    lengths = (5, 2, 3, 8, LONGEST_ROW, LONGEST_ROW + 1)
    text = random_tokens(sum(lengths), 4)
    model = LeanLlama(module, slots=1)
    called = with_step(model)
    slot = model.open()
    for count, end in zip(lengths, accumulate(lengths), strict=True):
        check_ends(model, module, [slot], [text[:end]], [count])
    # all but the last, which is longer than what is compiled
    assert called == {"row": 5 * module.config.num_hidden_layers}


def test_a_tree_and_a_branch_beside_others_attend_by_themselves() -> None:
    """A tree's tokens see their ancestors alone; a branch has memory of its own."""
    module, text = lean_family("llama"), random_tokens(9, 2)
    parents = (-1, 0, 0, 1)
    found = []
    for compiled in (False, True):
        model = LeanLlama(module, slots=4)
        slots = [model.open() for _ in range(3)]
        for slot in slots:
            model.forward([Forward("target", slot, text)])
        branch = model.open_branch()
        model.fork(slots[2], branch, 5)
        if compiled:
            with_step(model, forms=())
            called = with_parts(model)
        rows = [
            Forward("target", slots[0], (7,)),
            Forward("target", slots[1], (8,)),
            Forward("target", slots[2], (5, 6, 7, 8), 4, parents=parents),
            Forward("target", branch, (3, 4, 5), 3),
        ]
        found.append(torch.cat([output.logits for output in model.forward(rows)]))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=0)
    assert called["row"] == 2 * module.config.num_hidden_layers


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 4, 1, 2)], ids=["together", "apart"])
def test_rows_beside_parts_of_prompts_equal_the_plain_module(
    name: str, order: tuple[int, ...]
) -> None:
    """Rows of one token, packed side by side or not, a draft, and a piece of a prompt, in layers of
    which all parts are compiled."""
    module = lean_family(name)
    counts = [(1, 1, 1, 3, 40)[i] for i in order]
    texts = [random_tokens(9 + i + count, i) for i, count in zip(order, counts, strict=True)]
    model = LeanLlama(module, slots=5)
    slots = read_starts(model, texts, counts)
    with_step(model)
    called = with_parts(model)
    check_ends(model, module, slots, texts, counts)
    layers = module.config.num_hidden_layers
    assert called == dict.fromkeys(("BeforeAttention", "AfterAttention", "rows"), layers) | {
        "row": 2 * layers
    }, "the draft and the piece"


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_one_token_after_texts_of_very_different_lengths_attend_in_batches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of a long text among seven short ones would have all of them attend over as many
    positions."""
    monkeypatch.setattr(compiled_step, "MOST_WASTED_WHOLE", 10)
    monkeypatch.setattr(row_attention, "MOST_WASTED", 10)
    module = lean_family(name)
    texts = [random_tokens(count, count) for count in (4, 60, 7, 58, 5)]
    counts = [1] * len(texts)
    model = LeanLlama(module, slots=5)
    slots = read_starts(model, texts, counts)
    whole, parts = with_step(model), with_parts(model)
    check_ends(model, module, slots, texts, counts)
    layers = module.config.num_hidden_layers
    assert (whole["rows"], parts["rows"], parts["AfterAttention"]) == (0, 2 * layers, layers), (
        "batches of three and of two"
    )


@pytest.mark.parametrize(
    ("weights", "matrix_unit", "layers"),
    [
        pytest.param("int4", False, {6: None, 8: None, 9: []}, marks=ROUNDED, id="int4"),
        pytest.param(None, False, {1: None, 2: [], 512: []}, id="full"),
        pytest.param(None, True, {64: [], 65: None}, id="full, matrix unit"),
    ],
)
def test_which_numbers_of_tokens_of_no_form_read_compiled_halves(
    weights: Weights | None,
    matrix_unit: bool,
    layers: dict[int, list[Any] | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The halves have int4 weights in full: two drafts of three tokens would read four times as
    many bytes. Many tokens are left to a matrix unit."""
    monkeypatch.setattr(compiled_step, "has_matrix_unit", lambda: matrix_unit)
    model = LeanLlama(llama(torch.bfloat16, **WIDE), weights=weights, slots=2)
    with_step(model, *([("token", "row"), 8] if weights else []))
    assert model.step is not None
    model.step.halves = []
    assert {tokens: model.step.layers(tokens) for tokens in layers} == layers


def test_rows_attend_compiled_only_between_compiled_halves(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eager half hands on parts of a wider tensor, and a library would not look at their
    strides."""
    made: list[Path] = []
    monkeypatch.setattr(compiled_step, "compiled_calls", lambda *_: ([], []))
    # None: it could not be compiled
    monkeypatch.setattr(compiled_step, "loaded", lambda file, *_: made.append(file))
    model = LeanLlama(llama(torch.bfloat16), slots=2)
    weights = [
        packed_layer(layer_weights(*pair))
        for pair in zip(model.layers, model.module.model.layers, strict=True)
    ]
    step = compiled_step.compiled_step(model.layers, weights, model.slots, "try", [home])
    assert step is not None
    assert (step.halves, step.parts) == (None, None)
    assert len(made) <= 1, "no attention is compiled then"


def test_rows_of_alike_texts_stay_one_call_a_layer() -> None:
    model = LeanLlama(lean_family("llama"), slots=8)
    called = with_step(model)
    parts = with_parts(model)
    slots = read_starts(model, [random_tokens(21 + i, i) for i in range(8)], [1] * 8)
    parts.clear()
    model.forward([Forward("target", slot, (1,)) for slot in slots])
    assert (called["rows"], sum(parts.values())) == (model.module.config.num_hidden_layers, 0)


def test_a_token_in_a_branch_goes_the_eager_way() -> None:
    """Branches are no part of the slots' tensors; a row of several reads its slot alone."""
    module = lean_family("llama")
    model, plain = LeanLlama(module, slots=1), TransformersModel(module, slots=1)
    called = with_step(model)
    outputs = []
    for each in (model, plain):
        slot = each.open()
        each.forward([Forward("target", slot, random_tokens(5))])
        branch = each.open_branch()
        each.fork(slot, branch, 4)
        one = each.forward([Forward("target", branch, (7,))])[0].logits
        outputs.append(
            torch.cat([one, each.forward([Forward("target", branch, (5, 6), 2)])[0].logits])
        )
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    assert called == {"row": 2 * module.config.num_hidden_layers}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("outputs", [2 * OUTPUTS, OUTPUTS + 1])
def test_a_product_by_a_packed_weight_is_that_by_the_weight(tokens: int, outputs: int) -> None:
    """Of outputs that fill blocks and of those that do not, which stay as they are; with a bias,
    and with scales of an int8 weight."""
    random = torch.Generator().manual_seed(tokens)
    whole = torch.randint(-127, 128, (outputs, 24), generator=random, dtype=torch.int8)
    x, bias, scale = (
        torch.randn(*size, generator=random) for size in ((tokens, 24), (outputs,), (outputs,))
    )
    x = x.bfloat16().float()
    weights = packed_layer(
        {"down0": whole, "down0.bias": bias, "down0.scale": scale, "attention_norm": x[0]}
    )
    assert (weights["down0"].dim() > 2) == (outputs % OUTPUTS == 0)
    assert torch.equal(weights["attention_norm"], x[0])
    torch.testing.assert_close(
        product(x, weights["down0"], bias, scale),
        (x @ whole.float().T) * scale + bias,
        rtol=1e-5,
        atol=1e-3,
    )
    assert outputs % OUTPUTS or torch.equal(unpacked(packed(whole)), whole)


def test_nothing_is_compiled_unasked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_step, "build", lambda *_: pytest.fail("compiled"))
    assert started("auto").step is None
    assert started("off").step is None
    # float32 is what transformers is compared with
    assert LeanLlama(llama(), compiled="on").step is None


def test_no_compiler_is_said_in_a_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with raises_code("no_compiler", "g++", "compile=off"):
        started("on")


def test_a_library_that_cannot_be_loaded_is_left_out_unless_it_is_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A home may be shared with a machine of another C library: the default must serve there all
    the same."""
    broken = home / LIBRARY
    broken.write_text("no library")
    monkeypatch.setattr(compiled_step, "library", lambda *_: broken)
    assert started("auto").step is None
    assert "cannot be loaded" in caplog.text
    with raises_code("broken_compiled_layer", str(broken), "delete"):
        started("on")


def test_trying_skips_small_models_and_what_failed_before(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A minute of compiling that is tried at every start, or for a model of a few layers, would
    cost more than it ever saves."""
    monkeypatch.setattr(lean_llama, "compiler", lambda: "g++")
    tried = []

    def build(module: CompiledLayer, *_: Any) -> None:
        tried.append(type(module))
        raise DraftwellError("the linker failed", code="compile_failed")

    monkeypatch.setattr(compiled_step, "build", build)
    assert started("try").step is None
    assert tried == []
    assert "compiling layers" not in caplog.text
    compiled_step.say_compiling.cache_clear()
    monkeypatch.setattr(lean_llama, "WORTH_COMPILING", 0)
    assert started("try").step is None
    once = len(tried)
    assert once > 0
    assert caplog.text.count("compiling layers") == 1
    assert "the linker failed" in caplog.text
    assert started("try").step is None
    assert len(tried) == once
    with raises_code("compile_failed"):
        started("on")
    monkeypatch.setattr(lean_llama, "compiler", lambda: None)
    assert started("try").step is None


def test_a_library_may_lie_in_a_further_folder(home: Path) -> None:
    bundled, own = folders = [home / "bundled", home / "own"]
    assert library("key", folders).parent.parent == own
    there = bundled / "key" / LIBRARY
    there.parent.mkdir(parents=True)
    there.write_text("a library")
    assert library("key", folders) == there
    kept = own / "key" / LIBRARY
    kept.parent.mkdir(parents=True)
    kept.write_text("another")
    assert library("key", folders) == there, "that of the bundle was checked by its digest"


def test_a_home_that_cannot_be_written_is_no_error_unless_layers_are_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The default of all commands: it must not end where nothing can be kept."""
    (home / "compiled").write_text("a file in the folder's place")
    monkeypatch.setattr(lean_llama, "compiler", lambda: "g++")
    monkeypatch.setattr(compiled_library, "compiler", lambda: "g++")
    monkeypatch.setattr(lean_llama, "WORTH_COMPILING", 0)
    assert started("try").step is None
    assert "could not be compiled" in caplog.text
    with raises_code("compile_failed"):
        started("on")


def test_a_compiled_head_says_what_the_eager_one_says(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(2 * OUTPUTS, 16, generator=torch.Generator().manual_seed(1)).to(
        torch.bfloat16
    )
    states = torch.randn(6, 16, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)

    class Library:
        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            assert all(one.is_contiguous() for one in inputs)
            return [Head()(*inputs)]

    def eager(several: torch.Tensor) -> torch.Tensor:
        return several.float() @ weight.float().T

    assert compiled_step.compiled_head(weight, eager, "auto", [home]) == (eager, [])
    file = home / compiled_library.head_key(packed(weight)) / LIBRARY
    file.parent.mkdir()
    file.write_text("a library")
    monkeypatch.setattr(compiled_step, "load", lambda _: Library())
    head, found = compiled_step.compiled_head(weight, eager, "auto", [home])
    assert found == [file]
    for count in (1, 6):
        torch.testing.assert_close(head(states[:count]), eager(states[:count]))
    torch.testing.assert_close(head(states[::2]), eager(states[::2]))


@ROUNDED
def test_int4_weights_with_an_int8_one_among_them() -> None:
    """A feed-forward of 144 inputs fills no groups of 32: it is int8 in an int4 model."""
    model = LeanLlama(
        llama(torch.bfloat16, hidden_size=64, intermediate_size=144), weights="int4", slots=2
    )
    weights = layer_weights(model.layers[0], model.module.model.layers[0])
    read = packed_layer(weights)
    assert (read["qkv"].dtype, read["down0"].dtype) == (torch.uint8, torch.int8)
    x = torch.randn(2, 144, generator=torch.Generator().manual_seed(0))
    expected = x @ (weights["down0"].float() * weights["down0.scale"].float()[:, None]).T
    torch.testing.assert_close(
        product(x, read["down0"], None, read["down0.scale"]), expected, rtol=0.05, atol=0.05
    )


def key_of(model: LeanLlama) -> str:
    weights = whole_layer(model)
    return key(OneToken(model.layers[0], list(weights), model.shape.windows[0]), weights)


def test_a_library_is_shared_by_models_of_one_shape_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(**changes: Any) -> LeanLlama:
        return LeanLlama(llama(torch.bfloat16, **changes))

    same = key_of(one())
    assert (
        key_of(one(num_hidden_layers=1))
        == key_of(LeanLlama(llama(torch.bfloat16), slots=7, max_context=9))
        == same
    )
    others = [
        key_of(one(**changes))
        for changes in ({"intermediate_size": 64}, {"rms_norm_eps": 1e-3}, {"attention_bias": True})
    ]
    model = one()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert len({same, key_of(model), *others}) == 5


STEPS: dict[Form, list[int]] = {"token": [1], "row": [2, 3, 7, LONGEST_ROW], "rows": [1, 2, 3]}
"""Tokens of rows: of the row one pass after another, of rows at once."""


def say(model: LeanLlama, form: Form) -> torch.Tensor:
    """Logits of a form's passes over random tokens after some others."""
    slots = [model.open() for _ in (STEPS[form] if form == "rows" else [0])]
    for i, slot in enumerate(slots):
        # too long to be compiled
        model.forward([Forward("target", slot, random_tokens(17 + i, i))])
    rows = [
        Forward("target", slots[i if form == "rows" else 0], random_tokens(n, i + n), n)
        for i, n in enumerate(STEPS[form])
    ]
    passes = [rows] if form == "rows" else [[row] for row in rows]
    logits = torch.cat([output.logits for one in passes for output in model.forward(one)])
    for slot in slots:
        model.close(slot)
    return logits


def check_as_near(say: Callable[..., torch.Tensor], exact: LeanLlama, *others: LeanLlama) -> None:
    """What the first of two models computes is as near to float32 as the eager bfloat16 is."""
    right = say(exact)
    mine, theirs = ((say(one) - right).abs().mean() for one in others)
    assert mine < 1.2 * theirs


def say_beside_a_prompt(model: LeanLlama) -> torch.Tensor:
    """Logits of two rows of one token, a draft, and the whole of a prompt, in one pass."""
    slots = [model.open() for _ in range(3)]
    model.forward(
        [Forward("target", slot, random_tokens(17 + i, i)) for i, slot in enumerate(slots[:2])]
    )
    model.forward([Forward("target", slots[2], random_tokens(6, 5))])
    rows = [
        Forward("target", slots[0], (7,)),
        Forward("target", slots[1], (8,)),
        Forward("target", slots[2], random_tokens(40, 9), 40),
    ]
    logits = torch.cat([output.logits for output in model.forward(rows)])
    for slot in slots:
        model.close(slot)
    return logits


@ROUNDED
def test_a_library_for_rounded_weights_is_another_one() -> None:
    module = llama(torch.bfloat16, **WIDE)
    keys = {key_of(LeanLlama(module, weights=weights)) for weights in (None, *WEIGHTS)}
    assert len(keys) == 3


def exactly(module: Any, int8: bool) -> Any:
    """A copy in float32, with the weights that `Int8Linear` rounds to where int8 is wanted:
    rounding is no error of a forward pass."""
    exact = copy.deepcopy(module).float()
    for part in exact.model.layers.modules() if int8 else ():
        if isinstance(part, torch.nn.Linear):
            whole, scale = quantise(part.weight.to(torch.bfloat16))
            part.weight.data = whole.float() * scale.to(torch.bfloat16).float()[:, None]
    return exact


@compiles
@pytest.mark.parametrize("weights", WEIGHTS)
def test_compiled_layers_read_rounded_weights(weights: Weights, home: Path) -> None:
    module = llama(torch.bfloat16, **WIDE)
    eager, model = (
        LeanLlama(module, slots=3, weights=weights),
        LeanLlama(module, slots=3, weights=weights, compiled="on"),
    )
    assert model.step is not None
    for form in FORMS:
        torch.testing.assert_close(say(model, form), say(eager, form), atol=0.04, rtol=0.05)


@compiles
@pytest.mark.parametrize(("name", "int8"), [("qwen3", False), ("gemma2", False), ("llama", True)])
def test_a_compiled_model_says_what_the_eager_one_says_and_is_kept(
    name: str, int8: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All forms, few slots and many, and a start without a compiler from what is kept."""
    module = lean_family(name, torch.bfloat16)
    exact, eager = LeanLlama(exactly(module, int8), slots=3), LeanLlama(module, slots=3, int8=int8)
    models = [LeanLlama(module, slots=1, int8=int8, compiled="on")]
    windows = len(set(eager.shape.windows))
    found = len(list(home.glob(f"compiled/*/{LIBRARY}")))
    by_kernel = fits(eager.shape.head_dim)
    assert found == 3 * windows + 3 + by_kernel, (
        "by window tokens, rows and their attention; one row and its, two halves; no head"
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    models.append(LeanLlama(module, slots=3, int8=int8, compiled="auto"))
    for model in models:
        assert model.step is not None
        for form in FORMS:
            if form != "rows" or model.slots.count > 1:
                check_as_near(partial(say, form=form), exact, model, eager)
        assert model.step.halves
        assert model.step.parts
        assert (model.step.parts.row is not None) == by_kernel
        if model.slots.count > 1:
            check_as_near(say_beside_a_prompt, exact, model, eager)


@compiles
def test_a_row_beside_others_attends_by_the_kernel(home: Path) -> None:
    """By its library, for heads of a size that the kernel takes on every processor."""
    module = llama(
        torch.bfloat16, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32
    )
    exact, eager = LeanLlama(exactly(module, False), slots=3), LeanLlama(module, slots=3)
    model = LeanLlama(module, slots=3, compiled="on")
    assert model.step is not None
    assert model.step.parts is not None
    assert model.step.parts.row is not None
    check_as_near(say_beside_a_prompt, exact, model, eager)


@compiles
@pytest.mark.parametrize("form", ["token", "row"])
def test_a_library_touches_no_more_of_its_slots_than_it_needs(form: Form, home: Path) -> None:
    """With a single key head, as Gemma 3's small models have, the compiler once copied all slots,
    there and back, in every layer."""
    model = LeanLlama(llama(torch.bfloat16, num_key_value_heads=1))
    dim = model.shape.head_dim
    weights = whole_layer(model)
    compiled_library.build(
        FORMS[form](model.layers[0], list(weights), None), weights, home / LIBRARY
    )
    count, end = (1, 9) if form == "token" else (4, 9)
    positions = torch.arange(end - count, end)
    size = (64, 1, 1 << 17, dim) if form == "token" else (1, 1 << 23, dim)
    # of which nothing is touched yet
    memory = [torch.empty(size, dtype=torch.bfloat16) for _ in range(2)]
    for one in memory:
        (one[0] if form == "token" else one)[:, :end].zero_()
    place = (
        [torch.tensor([0]), positions, torch.arange(end)]
        if form == "token"
        else [positions, torch.zeros(count, end).bfloat16()]
    )
    states = torch.randn(count, model.module.config.hidden_size).bfloat16()
    rope = [torch.ones(count, 1, dim).bfloat16(), torch.zeros(count, 1, dim).bfloat16()]
    memory_of_process = psutil.Process().memory_info
    before = memory_of_process().rss
    load(home / LIBRARY).run([states, *rope, *memory, *place, *weights.values()])
    assert memory_of_process().rss - before < memory[0].nbytes // 4
    written = memory[0][0, 0] if form == "token" else memory[0][0]
    assert written[end - count : end].abs().sum() > 0
