"""Distillation on tiny models: the lean generator equals transformers, training learns and resumes, the artifact loads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from components.distillation.corpus import Conversation, batches, corpus_digest, frequent_tokens, generate_corpus, read_corpus
from components.distillation.export import agreement, load_checkpoint, to_artifact
from components.distillation.instructions import detokenise, from_passages, from_rows
from components.distillation.lean import LeanLlama, generate_batch
from components.distillation.training import Recipe, grow, head_of, losses, new_draft, train
from serving.runtime.artifacts.base import Provenance
from serving.runtime.artifacts.distilled_draft import DistilledDraft
from serving.runtime.pair import build_distilled

EOS = 2


@pytest.fixture(scope="module")
def target():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=EOS)
    model = LlamaForCausalLM(config).eval()
    for p in model.parameters():
        p.data *= 6.0 if p.ndim == 2 else 1.0  # sharper than a fresh model, so that there is something to learn
    return model


@pytest.fixture(scope="module")
def corpus_folder(target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lean = LeanLlama(target.state_dict(), target.config, torch.float32)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randrange(2, 9))] for _ in range(96)]
    generate_corpus(lean, prompts, folder, new_tokens=24, eos=EOS, batch=16, chunk=2, log=lambda line: None)
    return folder


def test_lean_batches_equal_transformers_one_by_one(target):
    lean = LeanLlama(target.state_dict(), target.config, torch.float32)
    prompts = [[5, 6, 7, 8, 9, 10], [11], [12, 13, 14]]
    for prompt, (out, hidden) in zip(prompts, generate_batch(lean, prompts, 20, EOS), strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=EOS)[0]
            states = target.model(expected[None, :-1]).last_hidden_state[0]
        assert out == expected[len(prompt) :].tolist()
        assert torch.allclose(hidden, states, atol=1e-4), "the states that training learns from"


def test_a_rerun_keeps_finished_shards(target, corpus_folder):
    before = corpus_digest(read_corpus(corpus_folder))
    first, *rest = sorted(corpus_folder.glob("shard-*"))
    stamps = {p: p.stat().st_mtime_ns for p in rest}
    content = first.read_bytes()
    first.unlink()
    lean = LeanLlama(target.state_dict(), target.config, torch.float32)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randrange(2, 9))] for _ in range(96)]
    generate_corpus(lean, prompts, corpus_folder, new_tokens=24, eos=EOS, batch=16, chunk=2, log=lambda line: None)
    assert first.read_bytes() == content
    assert {p: p.stat().st_mtime_ns for p in rest} == stamps
    assert corpus_digest(read_corpus(corpus_folder)) == before
    assert not list(corpus_folder.glob("*.partial"))


def test_training_learns_and_a_checkpoint_resumes(target, corpus_folder, tmp_path):
    recipe = Recipe(layers=(0, 3), head_tokens=64, minutes=0.06, batch_tokens=256, warmup_steps=5, peak_rate=1e-2)
    draft = new_draft(target, recipe.layers)
    embeddings = target.get_input_embeddings().weight.detach()
    corpus = read_corpus(corpus_folder)
    before = losses(draft, corpus[:40], head_of(corpus, embeddings, 64)[1], recipe)[1]
    head, result = train(draft, lambda: corpus, embeddings, recipe, tmp_path, log=lambda line: None)
    after = losses(draft, corpus[:40], head_of(corpus, embeddings, 64)[1], recipe)[1]
    assert after["kl"] < before["kl"]
    assert after["agreement"] > before["agreement"] + 0.2
    assert len(head) == 64
    assert not any(p.requires_grad for p in draft.get_input_embeddings().parameters()), "embeddings are the target's and stay frozen"
    again = new_draft(target, recipe.layers)
    progress = load_checkpoint(again, tmp_path)
    assert progress["steps"] == result["steps"] > 0
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_artifact_round_trip_changes_logits_only_by_rounding(target, corpus_folder, tmp_path):
    draft = new_draft(target, (0, 3))
    head, _ = head_of(read_corpus(corpus_folder), target.get_input_embeddings().weight.detach(), 64)
    to_artifact(draft, head, "d" * 64, Provenance(pair="tiny", fingerprint="f" * 64)).save(tmp_path / "draft")
    loaded = build_distilled(DistilledDraft.load(tmp_path / "draft"), target)
    assert loaded.get_input_embeddings().weight is target.get_input_embeddings().weight, "borrowed, not copied"
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        a, b = draft(ids).logits, loaded(ids).logits
    assert 0 < float((a - b).abs().max()) < 0.05 * float(a.abs().max())


def test_a_draft_on_another_device_copies_what_it_borrows(target, corpus_folder, tmp_path):
    draft = new_draft(target, (0, 3))
    head, _ = head_of(read_corpus(corpus_folder), target.get_input_embeddings().weight.detach(), 64)
    to_artifact(draft, head, "d" * 64, Provenance(pair="tiny", fingerprint="f" * 64)).save(tmp_path / "draft")
    loaded = build_distilled(DistilledDraft.load(tmp_path / "draft"), target, "meta")
    assert {p.device.type for p in loaded.parameters()} == {"meta"}
    assert {p.device.type for p in target.parameters()} == {"cpu"}


def test_agreement_of_a_model_with_itself_is_one(target):
    import copy

    from serving.runtime.models.transformers_model import TransformersModel
    from serving.runtime.pair import LoadedPair

    models = {"target": TransformersModel(copy.deepcopy(target)), "draft": TransformersModel(copy.deepcopy(target))}
    tokenizer = type("Tokenizer", (), {"eos_token_id": EOS, "all_special_ids": [EOS]})()
    pair = LoadedPair("tiny", "float32", "cpu", models, {"target": target}, tokenizer, "f" * 64)
    found = agreement(pair, [("a", [5, 6, 7]), ("b", [8])], max_tokens=12)
    assert found["agreement"] == 1.0
    assert found["tasks"] == {"a": 1.0, "b": 1.0}
    assert found["positions"] <= 24


def test_batches_cover_every_conversation_once_within_the_budget():
    conversations = [Conversation(torch.arange(n), 1, torch.zeros(n - 1, 1)) for n in [3, 50, 7, 20, 9, 31, 12]]
    groups = list(batches(conversations, 60, random.Random(1)))
    assert sorted(len(c.ids) for g in groups for c in g) == sorted(len(c.ids) for c in conversations)
    assert all(len(g) == 1 or max(len(c.ids) for c in g) * len(g) <= 60 for g in groups)


def test_head_covers_what_the_target_emits_most():
    text = Conversation(torch.tensor([9, 9, 9, 4, 4, 5]), 3, torch.zeros(5, 1))
    assert frequent_tokens([text], 2, 12).tolist() == [4, 5], "prompt tokens only break ties"
    assert frequent_tokens([text], 3, 12).tolist() == [4, 5, 9]


def test_instructions_are_text_without_tokenisation_artefacts():
    rng = random.Random(0)
    wiki = " The <unk> of 1 @,@ 000 ships ( in Rome ) was long . It took many years to build and Julius Caesar saw it finished . " * 3
    made = from_passages([wiki], 30, rng)
    assert len(made) == 30
    assert not any("<unk>" in m or " ." in m or "@" in m for m in made)
    assert detokenise('a " b " ( c ) .') == 'a "b" (c).'
    assert from_rows({"x": [{"prompt": "p"}]}, {"x": 5}, rng) == ["p"]


def test_a_draft_grows_without_a_change_and_every_new_layer_can_learn(target):
    shallow, ids = new_draft(target, (0, 3)), torch.randint(3, 97, (2, 12))
    for parameter in shallow.model.layers.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # a trained draft is no longer the target's layers
    deep = grow(shallow, target, (1, 2), at=1)
    torch.testing.assert_close(deep(ids).logits, shallow(ids).logits)
    assert deep.config.num_hidden_layers == 4
    torch.testing.assert_close(deep.model.layers[3].mlp.up_proj.weight, shallow.model.layers[1].mlp.up_proj.weight)
    deep(ids).logits.logsumexp(-1).sum().backward()
    assert all(layer.self_attn.o_proj.weight.grad.abs().sum() > 0 for layer in deep.model.layers)
