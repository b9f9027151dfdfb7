"""Every family is distilled: layers are kept as they are, the draft learns, is stored, and drafts
over slots without a loss."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config

from draftwell.components.distil.artifact import to_artifact, with_draft
from draftwell.components.distil.corpus import read_corpus, write_corpus
from draftwell.components.distil.family import (
    Head,
    check_layers,
    default_layers,
    draft_config,
    keep_layers,
    layers_of,
)
from draftwell.components.distil.training import Recipe, head_of, losses, train_draft
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.distilled_draft import DistilledDraft, lent_names
from draftwell.serving.artifacts.pair_files import PairFiles, weights_digest
from draftwell.serving.runtime.model_files import build_distilled, load_module
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import LoadSettings, load_pair
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.errors import raises_code
from tests.support.models.checkpoints import checkpoint
from tests.support.models.families import (
    CONTEXT,
    FAMILIES,
    LAYERS,
    VOCAB,
    some_prompts,
    tiny_source,
    tiny_target,
)

MADE = Provenance(pair="tiny", fingerprint="d" * 64)
QUICK = Recipe(
    layers=(0, 3), head_tokens=48, tokens=12_000, batch_tokens=256, warmup_steps=5, peak_rate=5e-3
)
LENT = {
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "gpt2": {"transformer.wte.weight", "lm_head.weight"},
    "gpt_neox": {"gpt_neox.embed_in.weight", "lm_head.weight"},
}


SLOW = [pytest.mark.slow]
OF_EACH_KIND = ("llama", "gemma3", "gpt2")
"""Rotary, with windows, and with learnt positions: the others are trained in the slow tests
alone."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in OF_EACH_KIND else SLOW) for name in FAMILIES],
)
def learnt(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """A target, its corpus, a draft that was trained on it, and the losses before and after."""
    name = request.param
    source, folder = tiny_source(name), tmp_path_factory.mktemp(name)
    module = source.target.modules["target"]
    corpus = read_corpus(
        write_corpus(
            source.writer,
            source.prompts,
            folder,
            donor="d" * 64,
            new_tokens=16,
            batch=16,
            say=lambda line: None,
        )
    )
    head = head_of(corpus, module, QUICK.head_tokens)
    draft = keep_layers(module, QUICK.layers)
    before = losses(draft, corpus[:40], head, QUICK)[1]
    train_draft(
        draft, corpus, head, QUICK, folder / "training", donor="d" * 64, say=lambda line: None
    )
    after = losses(draft, corpus[:40], head, QUICK)[1]
    to_artifact(draft, head.ids, "d" * 64, MADE).save(folder / "draft")
    return SimpleNamespace(
        name=name,
        source=source,
        module=module,
        corpus=corpus,
        head=head,
        draft=draft,
        before=before,
        after=after,
        artifact=folder / "draft",
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_kept_layers_are_the_targets(name: str) -> None:
    """Against the target's own layer objects in a shorter list: windows and kinds go with the
    layers, not with their new numbers."""
    target = tiny_target(name)
    draft = keep_layers(target, (1, 2))
    shorter = copy.deepcopy(target)
    config = shorter.config
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[1:3]
    config.num_hidden_layers = 2
    place, attribute = (shorter.base_model, "h" if name == "gpt2" else "layers")
    setattr(place, attribute, nn.ModuleList(list(getattr(place, attribute))[1:3]))
    # longer than the window of six
    ids = torch.randint(3, VOCAB, (2, 14), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found, again = (
            shorter(ids, use_cache=False).logits,
            draft(ids).logits,
            draft(ids).logits,
        )
    assert torch.allclose(found, expected, atol=1e-4), float((found - expected).abs().max())
    assert torch.equal(found, again), "dropout has no place in a draft"


@pytest.mark.parametrize("name", FAMILIES)
def test_only_layers_and_final_norm_are_trained(name: str) -> None:
    draft = keep_layers(tiny_target(name), (0, 3))
    frozen = {n for n, p in draft.named_parameters(remove_duplicate=False) if not p.requires_grad}
    assert frozen == lent_names(draft) | ({"transformer.wpe.weight"} if name == "gpt2" else set())
    assert LENT.get(name, LENT["llama"]) == lent_names(draft)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_is_the_modules_own(name: str) -> None:
    """Rows of the output embedding, Gemma2's bound of the logits included."""
    module, ids = tiny_target(name), torch.tensor([[5, 9, 30, 7, 12]])
    tokens = torch.tensor([2, 5, 17, 60])
    with torch.no_grad():
        states = module.base_model(ids, use_cache=False).last_hidden_state[0]
        expected = module(ids, use_cache=False).logits[0][:, tokens]
        found = Head.of(module, tokens)(states.bfloat16())
    assert torch.allclose(found, expected, atol=0.03 * float(expected.abs().max()))


def test_the_target_writes_what_it_would_say(learnt: SimpleNamespace) -> None:
    """Stored states lead to the stored tokens: on float32 logits, the argmax of every position
    after the prompt."""
    weight = learnt.module.get_output_embeddings().weight.detach()
    for conversation in learnt.corpus[::7]:
        logits = conversation.hidden.float() @ weight.T
        said = logits.argmax(-1)[conversation.prompt - 1 :]
        assert said.tolist() == conversation.ids[conversation.prompt :].tolist()
        assert len(conversation.hidden) == len(conversation.ids) - 1


def test_the_draft_learns(learnt: SimpleNamespace) -> None:
    assert learnt.after["kl"] < 0.7 * learnt.before["kl"]
    assert learnt.after["agreement"] > learnt.before["agreement"]


def test_the_artifact_holds_what_is_not_lent(learnt: SimpleNamespace) -> None:
    artifact, module = DistilledDraft.load(learnt.artifact), tiny_target(learnt.name)
    assert not artifact.state.keys() & lent_names(module)
    assert ("transformer.wpe.weight" in artifact.state) == (learnt.name == "gpt2")
    built = build_distilled(artifact, module)
    assert built.get_input_embeddings() is module.get_input_embeddings(), "borrowed, not copied"
    assert built.get_output_embeddings() is module.get_output_embeddings()
    assert built.config.num_hidden_layers == 2
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    with torch.no_grad():
        exact, rounded = learnt.draft(ids).logits, built(ids).logits
    assert 0 < float((exact - rounded).abs().max()) < 0.15 * float(exact.abs().max())


def test_drafting_over_slots_loses_nothing(learnt: SimpleNamespace) -> None:
    pair = with_draft(
        learnt.source.target, DistilledDraft.load(learnt.artifact), slots=8, max_context=CONTEXT
    )
    engine, accepted = pair.engine(), 0
    for ids in some_prompts(6, seed=4):
        plain = engine.generate(ids, pair.sampling(max_tokens=24), build_strategy("autoregressive"))
        drafted = engine.generate(
            ids,
            pair.sampling(max_tokens=24),
            build_strategy("vanilla_sd", {"num_speculative_tokens": 4}),
        )
        assert drafted.output == plain.output
        accepted += drafted.session.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_draft_in_bfloat16_is_rounded_where_layers_of_ours_run(kind: str, tmp_path: Path) -> None:
    """Others keep full weights: a draft that was distilled for days must load."""
    config = GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=259) if kind == "gpt2" else None
    files = PairFiles("tiny", checkpoint(tmp_path / "target", config), tmp_path / "draft")
    assert files.draft is not None
    module = load_module(files.target, torch.bfloat16, "cpu")
    artifact = to_artifact(
        keep_layers(module, (0, 1)), torch.arange(99), weights_digest(files.target), MADE
    )
    artifact.save(files.draft)
    loaded = load_pair(files, LoadSettings(dtype="bfloat16"), keep_modules=True)
    made = with_draft(loaded, artifact, slots=1, max_context=64)
    for pair in (loaded, made):
        draft = pair.models["draft"]
        assert isinstance(draft, LeanLlama if kind == "llama" else TransformersModel)
        job = pair.engine().generate(
            [5, 6, 7], pair.sampling(max_tokens=8), build_strategy("vanilla_sd")
        )
        assert job.session.stats.drafted > 0


@pytest.mark.parametrize(
    ("layers", "words"), [((0, 99), "12 layers"), ((3, 1), "3,1"), ((1, 1), "1,1"), ((), "(none)")]
)
def test_layers_that_make_no_draft(layers: tuple[int, ...], words: str) -> None:
    with raises_code("bad_layers", words):
        check_layers(layers, 12)
    assert check_layers((0, 11), 12) == (0, 11)


def test_a_list_as_long_as_the_model_is_deep_is_not_a_list_of_layers() -> None:
    target = tiny_target("llama")
    target.config.eos_token_id = [2, 3, 4, 5]
    assert len(target.config.eos_token_id) == LAYERS
    assert draft_config(target, (0, 3)).eos_token_id == [2, 3, 4, 5]


def test_layers_that_depend_on_their_number_are_refused() -> None:
    target = tiny_target("gpt2")
    target.config.scale_attn_by_inverse_layer_idx = True
    with raises_code("numbered_layers", "gpt2"):
        keep_layers(target, (0, 3))


def test_layers_that_are_not_alike_are_refused() -> None:
    target = tiny_target("llama")
    target.model.layers[3].mlp.up_proj = nn.Linear(32, 40, bias=False)
    with raises_code("unlike_layers", "llama"):
        keep_layers(target, (0, 3))
    assert layers_of(keep_layers(target, (0, 1))) == "model.layers."


def test_a_model_with_layers_elsewhere_is_refused() -> None:
    target: Any = tiny_target("llama")
    target.model.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(LAYERS))
    with raises_code("unknown_architecture", "llama"):
        layers_of(target)


def test_a_target_of_one_layer_has_no_default() -> None:
    with raises_code("one_layer"):
        default_layers(1)
