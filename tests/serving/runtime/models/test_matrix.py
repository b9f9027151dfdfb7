"""Every architecture of `matrix.yaml` writes what transformers writes, or is refused;
docs/models.md says which."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.architecture import context_of
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.native.library import compiler
from draftwell.serving.runtime.models.transformers_model import PACKED, TransformersModel
from draftwell.serving.runtime.models.unbatched_model import REREAD, UNBATCHED, UnbatchedModel
from draftwell.serving.runtime.pair import over_slots
from tests.support.cases import quick_only
from tests.support.errors import raises_code
from tests.support.models.matrix import LIMIT, PROMPTS, ROWS, check
from tests.support.models.model_page import COMPUTES, PAGE, cells, read_page, render_page

NAMED = {row.name: row for row in ROWS}
BORDER = 32
"""The pre-training length of rows with LongRoPE."""
QUICK = ("Llama", "Phi-3, LongRoPE", "Exaone 4", "gpt-oss", "DeepSeek-V3", "Qwen2-VL", "Mamba")
"""A row of every path, and of every kind of layer that was once wrong."""


@pytest.mark.parametrize(
    ("name", "row"), quick_only(((row.name, row) for row in ROWS), *QUICK), ids=str
)
def test_a_model_writes_what_transformers_writes_or_is_refused(name, row, tmp_path):
    """Slow for all but a few: they take some ten minutes together on two busy cores."""
    found = cells(row, check(row, tmp_path))
    compiled = "lean layers" if compiler() is None else "native"
    *others, way = read_page()[name][:-1]
    assert found == (*others, compiled if way == "native" else way)


def test_the_page_has_a_line_for_every_row_and_no_other():
    page = read_page()
    assert sorted(page) == sorted(NAMED)
    assert len(page) == len(ROWS)
    assert all(page[name][1] == f"`{row.kind}`" for name, row in NAMED.items())
    exact = {cells[1] for cells in page.values() if cells[2] == "exact"}
    assert len(exact) >= 90
    assert all(float(row[4]) >= 1 for row in page.values() if row[2] == "exact")


def test_a_page_is_read_as_it_was_written():
    rows = read_page().values()
    assert {row[3] for row in rows} == set(COMPUTES) | {""}
    assert PAGE.read_text(encoding="utf-8").endswith(render_page(rows))


def test_every_architecture_that_is_taken_is_exact_in_the_page():
    exact = {cells[1].strip("`") for cells in read_page().values() if cells[2] == "exact"}
    assert (PACKED | UNBATCHED) - exact == set()
    assert exact >= REREAD


def module_of(name: str) -> Any:
    return NAMED[name].module()


@pytest.mark.parametrize("name", ["Phi-3, LongRoPE", "Phi-3.5-MoE, LongRoPE"])
def test_a_text_that_crosses_longropes_border_and_comes_back_equals_one_pass(name):
    """Fed in pieces, with drafts on both sides of the border that are rejected, and forked."""
    module = module_of(name)
    model = over_slots(module, slots=2, max_context=LIMIT)
    assert isinstance(model, UnbatchedModel)
    text = PROMPTS[0]
    slot = model.open()
    fed = 0
    for piece, draft in ((29, 2), (1, 6), (1, 4), (1, 1), (1, 5), (4, 3)):
        row = Forward("target", slot, tuple(text[fed : fed + piece]), 1)
        fed += piece
        last = model.forward([row])[0].logits[0]
        drafted = model.forward([Forward("target", slot, tuple(range(50, 50 + draft)), draft)])
        with torch.no_grad():
            wanted = module(torch.tensor([text[:fed]])).logits[0, -1]
            for count in range(1, draft + 1):
                longer = [*text[:fed], *range(50, 50 + count)]
                other = module(torch.tensor([longer])).logits[0, -1]
                assert torch.allclose(drafted[0].logits[count - 1], other, atol=2e-4), (fed, count)
        assert torch.allclose(last, wanted, atol=2e-4), fed
        model.rollback(slot, fed)
    branch = model.open_branch()
    model.fork(slot, branch, BORDER - 1)
    shorter = model.forward([Forward("target", branch, (text[BORDER - 1],), 1)])[0].logits[0]
    with torch.no_grad():
        wanted = module(torch.tensor([text[:BORDER]])).logits[0, -1]
    assert torch.allclose(shorter, wanted, atol=2e-4)


@pytest.mark.parametrize("name", ["Phi-3, LongRoPE", "Phi-3.5-MoE, LongRoPE"])
def test_a_prompt_over_longropes_border_is_read_in_one_pass(name):
    module, text = module_of(name), PROMPTS[0]
    assert len(text) > BORDER
    model = over_slots(module, max_context=LIMIT)
    read = model.forward([Forward("target", model.open(), tuple(text), len(text))])[0].logits
    with torch.no_grad():
        assert torch.allclose(read, module(torch.tensor([text])).logits[0], atol=2e-4)


def test_slots_within_longropes_border_take_the_fast_path():
    model = over_slots(module_of("Phi-3, LongRoPE"), max_context=BORDER)
    assert isinstance(model, LeanLlama)


@pytest.mark.parametrize("name", ["Llama, LongRoPE", "Llama, dynamic rope, longer texts"])
def test_a_context_that_changes_earlier_positions_is_refused_and_none_is_taken_unasked(name):
    module = module_of(name)
    border = over_slots(module).max_context
    assert border == context_of(module.config, None) < LIMIT
    for adapter in (over_slots, TransformersModel):
        with raises_code("unsupported_architecture", "llama", str(border), str(border + 1)):
            adapter(module, max_context=border + 1)


def test_an_architecture_that_is_in_no_list_is_refused_by_name():
    from transformers import AutoModelForCausalLM, BertGenerationConfig

    config = BertGenerationConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, is_decoder=True
    )
    with raises_code("unsupported_architecture", "bert-generation", "compared"):
        over_slots(AutoModelForCausalLM.from_config(config))
