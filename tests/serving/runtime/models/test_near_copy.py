"""Near copies: the target's own layers, fewer of them or rounded, as its draft."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from draftwell.serving.artifacts.near_copy import RECIPE, NearCopy, read_near_copy
from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.model_files import load_module
from draftwell.serving.runtime.models.near_copy import drop_layers
from draftwell.serving.runtime.pair import LoadedPair, LoadSettings, load_pair
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.errors import raises_code
from tests.support.models.tiny import llama

PROMPT = (5, 4, 3, 7, 6)


def files(tiny_models: dict[Role, Path], folder: Path, recipe: NearCopy) -> PairFiles:
    folder.mkdir(exist_ok=True)
    (folder / RECIPE).write_bytes(recipe.to_json())
    return PairFiles("tiny", tiny_models["target"], folder)


def logits(pair: LoadedPair, role: Role) -> torch.Tensor:
    model = pair.models[role]
    slot = model.open()
    found = model.forward([Forward(role, slot, PROMPT, len(PROMPT))])[0].logits
    model.close(slot)
    return found


def test_a_copy_of_everything_is_the_target_also_of_a_padded_one(
    tiny_models: dict[Role, Path], tmp_path: Path
) -> None:
    pair = load_pair(
        files(tiny_models, tmp_path / "copy", NearCopy()),
        LoadSettings(dtype="float32", pad_target=300_000.0),
    )
    assert pair.padded_to is not None
    assert torch.equal(logits(pair, "draft"), logits(pair, "target"))
    assert sum(p.numel() for p in pair.modules["draft"].parameters()) < pair.padded_to / 2, (
        "the copy is of the target as it was"
    )
    strategy = build_strategy("vanilla_sd", {"num_speculative_tokens": 3})
    stats = (
        pair.engine().generate(list(PROMPT), pair.sampling(max_tokens=12), strategy).session.stats
    )
    assert stats.judged > 0
    assert stats.acceptance_rate == 1.0


def test_a_qualifier_is_padded_to_its_share_of_a_padded_target_and_writes_the_same(
    tiny_models: dict[Role, Path], tmp_path: Path
) -> None:
    copies = files(tiny_models, tmp_path / "copy", NearCopy(drop_layers=(0,)))
    shared = files(
        tiny_models, tmp_path / "qualifier", NearCopy(drop_layers=(0,), padded_share=0.375)
    ).draft
    three = dataclasses.replace(copies, qualifier=shared)
    plain, padded = (
        load_pair(three, LoadSettings(dtype="float32", pad_target=parameters), keep_modules=True)
        for parameters in (None, 600_000.0)
    )
    sizes = {
        role: sum(p.numel() for p in module.parameters()) for role, module in padded.modules.items()
    }
    assert sizes["qualifier"] == pytest.approx(0.375 * sizes["target"], rel=0.05)
    assert sizes["draft"] < sizes["qualifier"] / 2
    assert sum(p.numel() for p in plain.modules["qualifier"].parameters()) == sizes["draft"], (
        "next to a target as it is, so is the copy"
    )
    assert torch.equal(logits(padded, "qualifier"), logits(plain, "draft"))


def test_recipes_that_were_written_before_copies_were_padded_keep_their_bytes() -> None:
    assert NearCopy(drop_layers=(3,)).to_json() == b'{"drop_layers": [3], "weights": null}\n'
    assert b"padded_share" in NearCopy(padded_share=0.375).to_json()


def test_layers_that_are_left_out_are_left_out(
    tiny_models: dict[Role, Path], tmp_path: Path
) -> None:
    pair = load_pair(
        files(tiny_models, tmp_path / "copy", NearCopy(drop_layers=(0,))),
        LoadSettings(dtype="float32"),
    )
    by_hand = load_module(tiny_models["target"], torch.float32, "cpu")
    by_hand.model.layers = torch.nn.ModuleList(list(by_hand.model.layers)[1:])
    with torch.inference_mode():
        wanted = by_hand(torch.tensor([PROMPT]), use_cache=False).logits[0]
    found = logits(pair, "draft")
    torch.testing.assert_close(found, wanted[:, : found.shape[1]], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, logits(pair, "target"), atol=1e-3)


def test_rounded_weights_are_near_the_target_and_not_the_target(
    tiny_models: dict[Role, Path], tmp_path: Path
) -> None:
    pair = load_pair(
        files(tiny_models, tmp_path / "copy", NearCopy(weights="int8")),
        LoadSettings(dtype="float32"),
    )
    draft, target = logits(pair, "draft"), logits(pair, "target")
    assert not torch.equal(draft, target)
    torch.testing.assert_close(draft.softmax(-1), target.softmax(-1), rtol=0, atol=0.05)


def test_every_recipe_is_another_pair(tiny_models: dict[Role, Path], tmp_path: Path) -> None:
    marks = [
        fingerprint(files(tiny_models, tmp_path / f"{i}", recipe), "float32")
        for i, recipe in enumerate(
            [NearCopy(), NearCopy(drop_layers=(0,)), NearCopy(weights="int8"), NearCopy()]
        )
    ]
    assert len(set(marks)) == 3
    assert marks[0] == marks[3]


def test_a_module_with_fewer_layers_still_decodes_with_the_librarys_cache() -> None:
    module = drop_layers(copy.deepcopy(llama(3)), (1,))
    assert (module.config.num_hidden_layers, len(module.model.layers)) == (2, 2)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        whole = module(ids, use_cache=False).logits[:, -1]
        cache = module(ids[:, :-1], use_cache=True).past_key_values
        last = module(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(last, whole)


def test_mistakes_are_one_line(tiny_models: dict[Role, Path], tmp_path: Path) -> None:
    for dropped in ((7,), tuple(range(len(llama(2).model.layers)))):
        with raises_code("no_such_layer", "drop_layers"):
            drop_layers(copy.deepcopy(llama(2)), dropped)
    rounded = files(tiny_models, tmp_path / "copy", NearCopy(weights="int8"))
    with raises_code("weights_unsupported", "int8", "cuda"):
        load_pair(rounded, LoadSettings(dtype="bfloat16", device="cuda"))
    with raises_code("weights_unsupported", "int8", "the dtype bfloat16"):
        load_pair(rounded, LoadSettings(dtype="bfloat16"), keep_modules=True)
    (tmp_path / "copy" / RECIPE).write_text("{")
    with raises_code("broken_near_copy", RECIPE):
        read_near_copy(tmp_path / "copy")


@pytest.mark.parametrize("recipe", [NearCopy(drop_layers=(0,)), NearCopy(weights="int8")])
def test_greedy_text_is_the_targets(
    tiny_models: dict[Role, Path], tmp_path: Path, recipe: NearCopy
) -> None:
    pair = load_pair(files(tiny_models, tmp_path / "copy", recipe), LoadSettings(dtype="float32"))
    texts = [
        pair.engine()
        .generate(list(PROMPT), pair.sampling(max_tokens=16), build_strategy(name, {}))
        .output
        for name in ("autoregressive", "vanilla_sd")
    ]
    assert texts[0] == texts[1]
