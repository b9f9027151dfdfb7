"""A model that is brought into a layout of its own holds at most one layer twice, and computes what
it did."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.model_files import context_within, load_module, released_as_read
from draftwell.serving.runtime.models import lean_llama
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.pair import LoadSettings, load_pair, over_slots
from tests.support.errors import raises_code
from tests.support.models.checkpoints import edit
from tests.support.models.llama_shapes import llama, random_tokens
from tests.support.models.matrix import ROWS

LAYERS = 4


def held(module: Any) -> list[bool]:
    """For each layer whether the module still holds its projections."""
    # not by going through the layers, which may be what gives them up
    return [
        layer.self_attn.q_proj.weight.numel() > 0 for layer in module.model.layers._modules.values()
    ]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_released_one_by_one(
    monkeypatch: pytest.MonkeyPatch, static: bool, dtype: torch.dtype
) -> None:
    seen: list[list[bool]] = []
    module, make = llama(dtype, num_hidden_layers=LAYERS), lean_llama.Layer
    monkeypatch.setattr(
        lean_llama, "Layer", lambda *arguments: (seen.append(held(module)), make(*arguments))[1]
    )
    want = over_slots(llama(dtype, num_hidden_layers=LAYERS), static=static)
    seen.clear()
    model = over_slots(module, static=static, release=True)
    assert seen == [[False] * done + [True] * (LAYERS - done) for done in range(LAYERS)]
    assert held(module) == [False] * LAYERS
    assert type(module.model.layers) is torch.nn.ModuleList
    outputs = [
        m.forward([Forward("target", m.open(), random_tokens(20), 20)])[0] for m in (model, want)
    ]
    assert torch.equal(outputs[0].logits, outputs[1].logits)


def test_a_module_that_is_to_run_keeps_its_layers() -> None:
    module = llama(num_hidden_layers=LAYERS)
    assert isinstance(over_slots(module), LeanLlama)
    assert held(module) == [True] * LAYERS
    adapter = over_slots(llama(num_hidden_layers=LAYERS, attention_bias=True), release=True)
    slot = adapter.open()
    assert adapter.forward([Forward("target", slot, (1, 2, 3), 3)])[0].logits.shape == (3, 61)


@pytest.mark.parametrize("keep", [False, True])
def test_a_pair_releases_what_its_modules_need_not_run(
    tiny_models: dict[Role, Path], keep: bool
) -> None:
    pair = load_pair(
        PairFiles("tiny", tiny_models["target"], tiny_models["draft"]),
        LoadSettings(dtype="float32"),
        keep_modules=keep,
    )
    for role in ("target", "draft"):
        assert held(pair.modules[role]) == [keep] * len(held(pair.modules[role]))  # type: ignore[index]


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="Linux alone lists a process's mapped files"
)
def test_nothing_of_a_released_module_keeps_its_file_in_memory(tmp_path: Path) -> None:
    """One embedding or norm that is still a part of the mapped file would keep all of its pages."""
    llama().save_pretrained(tmp_path / "mapped")

    def mapped() -> bool:
        return str(tmp_path / "mapped") in Path("/proc/self/maps").read_text()

    module = load_module(tmp_path / "mapped", torch.float32, "cpu")
    assert mapped()
    with released_as_read(module):
        assert len([layer for layer in module.model.layers if layer is not None]) == 2
    assert not mapped()


def test_lent_embeddings_are_copied_once(tmp_path: Path) -> None:
    """A target in float32 reads its head where it was when the target was loaded: a copy for the
    draft would be a second one."""
    llama().save_pretrained(tmp_path / "lends")
    target, draft = load_module(tmp_path / "lends", torch.float32, "cpu"), llama()
    mapped = target.model.embed_tokens.weight.data_ptr()
    over_slots(target, release=True)
    own = target.model.embed_tokens.weight.data_ptr()
    assert own != mapped
    draft.set_input_embeddings(target.get_input_embeddings())
    norm = draft.model.norm.weight.data_ptr()
    over_slots(draft, release=True, lender=target)
    assert draft.model.norm.weight.data_ptr() != norm, "what is its own is copied"
    assert draft.model.embed_tokens.weight is target.model.embed_tokens.weight
    assert target.model.embed_tokens.weight.data_ptr() == own


def test_a_small_models_context_is_what_it_was_trained_for() -> None:
    from transformers import BloomConfig

    module = llama()
    assert [context_within(module.config, wanted) for wanted in (None, 64, 4096)] == [None, 64, 128]
    assert context_within(BloomConfig(), 4096) == 4096, "it names no limit"


@pytest.mark.parametrize("name", ["Llama, LongRoPE", "Phi-3, LongRoPE"])
def test_a_small_models_context_ends_where_its_rotary_factors_change(name: str) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    module = row.module()
    context = context_within(module.config, 128)
    assert context == 32 < module.config.max_position_embeddings
    assert isinstance(over_slots(module, max_context=context), LeanLlama)


def test_a_qualifier_that_is_not_loaded_is_not_read(
    tiny_models: dict[Role, Path], tmp_path: Path
) -> None:
    qualifier = shutil.copytree(tiny_models["draft"], tmp_path / "qualifier")
    edit(qualifier / "config.json", model_type="nobody")
    files = PairFiles("tiny", tiny_models["target"], tiny_models["draft"], qualifier)
    pair = load_pair(files, LoadSettings(dtype="float32"), qualifier=False)
    assert set(pair.models) == {"target", "draft"}
    with raises_code("unknown_model", "nobody"):
        load_pair(files, LoadSettings(dtype="float32"))


def test_a_pair_may_have_a_target_with_a_longer_context_than_its_draft(
    tiny_models: dict[Role, Path],
) -> None:
    pair = load_pair(
        PairFiles("tiny", tiny_models["target"], tiny_models["draft"]),
        LoadSettings(dtype="float32", max_context=1000),
    )
    limit = pair.modules["draft"].config.max_position_embeddings
    assert pair.models["draft"].max_context == limit < pair.models["target"].max_context == 1000
