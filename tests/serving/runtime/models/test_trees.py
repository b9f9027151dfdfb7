"""A tree in one forward pass gives the logits of each of its paths, and one path of it can be kept;
in every adapter that says so."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.models.unbatched_model import UnbatchedModel
from draftwell.serving.runtime.models.visible import visible
from draftwell.serving.runtime.trees import DraftTree
from tests.support.models.by_library import ALL_WAYS
from tests.support.models.lean_families import lean_family
from tests.support.models.llama_shapes import llama, plain_logits

TREE = DraftTree([7, 8, 9, 10, 11, 12], [-1, -1, 0, 0, 1, 4])
FAMILIES = ("llama", "gemma2", "gemma3", "qwen3")
MAKERS = [pytest.param(TransformersModel, id="transformers"), *ALL_WAYS]
PROMPTS = [[1, 2, 3, 4, 5, 6, 13, 14, 15], [21, 22, 23]]


def last_logits(module, prompt, tree, place):
    """Behind the path of a tree to one of its tokens."""
    return plain_logits(module, prompt + [tree.tokens[i] for i in tree.path(place)])[-1]


def read(model, prompts, trees):
    """The trees after their prompts, all in one pass, each behind the prompt's last token."""
    slots = [model.open() for _ in prompts]
    model.forward(
        [
            Forward("target", slot, tuple(prompt[:-1]))
            for slot, prompt in zip(slots, prompts, strict=True)
        ]
    )
    rows = [
        Forward(
            "target",
            slot,
            (prompt[-1], *tree.tokens),
            len(tree) + 1,
            parents=(-1, *(parent + 1 for parent in tree.parents)),
        )
        for slot, prompt, tree in zip(slots, prompts, trees, strict=True)
    ]
    return slots, [output.logits for output in model.forward(rows)]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_tree_gives_each_paths_logits_and_one_path_can_be_kept(name, make, rows):
    module = lean_family(name)
    model = make(lean_family(name), slots=3)
    check(module, model, [TREE, DraftTree([9, 30, 31], [-1, 0, 0])][:rows])


def check(module, model, trees):
    prompts = PROMPTS[: len(trees)]
    slots, found = read(model, prompts, trees)
    for prompt, tree, logits in zip(prompts, trees, found, strict=True):
        assert torch.allclose(logits[0], plain_logits(module, prompt)[-1], atol=5e-5)
        for place in range(len(tree)):
            wanted = last_logits(module, prompt, tree, place)
            assert torch.allclose(logits[1 + place], wanted, atol=5e-5)
    for slot, prompt, tree in zip(slots, prompts, trees, strict=True):
        path = tree.path(len(tree) - 1)
        model.keep(slot, len(prompt), path)
        text = prompt + [tree.tokens[i] for i in path]
        (after,) = model.forward([Forward("target", slot, (33,))])
        assert torch.allclose(after.logits[0], plain_logits(module, [*text, 33])[-1], atol=5e-5)


@pytest.mark.parametrize("make", MAKERS)
def test_hidden_states_of_chosen_layers_are_kept_for_each_position(make):
    """For prompts read in pieces, single tokens, drafts, and the path that is kept of a tree; what
    is rolled back is overwritten. The number of layers stands for the normalised last states."""
    module = lean_family("llama")
    layers = (0, 1, 2, module.config.num_hidden_layers)
    model = make(lean_family("llama"), slots=2)
    model.keep_hidden_states(layers)
    model.open()
    slots, _ = read(model, PROMPTS[:1], [TREE])
    model.keep(slots[0], len(PROMPTS[0]), [1, 4])
    model.forward([Forward("target", slots[0], (40, 41, 42), 3)])
    model.rollback(slots[0], len(PROMPTS[0]) + 3)
    model.forward([Forward("target", slots[0], (43,))])
    text = [*PROMPTS[0], 8, 11, 40, 43]
    with torch.no_grad():
        seen = module(torch.tensor([text]), output_hidden_states=True).hidden_states
    kept = model.hidden_states(slots[0], 0, len(text))
    assert torch.allclose(kept, torch.cat([seen[layer][0] for layer in layers], -1), atol=5e-5)


def test_a_model_without_hidden_states_says_so():
    model = LeanLlama(llama(), slots=1)
    with pytest.raises(DraftwellError) as refused:
        model.hidden_states(model.open(), 0, 1)
    assert refused.value.code == "no_hidden_states"


def test_row_by_row_models_take_no_trees():
    assert not UnbatchedModel.trees


def test_a_window_is_counted_in_positions_not_in_places():
    """Two siblings lie side by side and have one position: with a window of two the second still
    sees the token before both."""
    assert visible(2, 2, 2, [-1, -1]).int().tolist() == [[0, 1, 1, 0], [0, 1, 0, 1]]
