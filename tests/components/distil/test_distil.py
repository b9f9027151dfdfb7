"""Distillation on tiny models: the lean generator equals transformers, training learns and resumes,
the artifact loads."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwell.components.distil import corpus
from draftwell.components.distil.artifact import agreement, to_artifact
from draftwell.components.distil.corpus import (
    Conversation,
    batches,
    checkpoint_on,
    corpus_digest,
    frequent_tokens,
    read_corpus,
    write_corpus,
)
from draftwell.components.distil.distil import distil_draft
from draftwell.components.distil.family import grow, keep_layers
from draftwell.components.distil.instructions import before_a_user, invent
from draftwell.components.distil.training import Recipe, head_of, losses, train_draft
from draftwell.components.distil.writers import Writer
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.train.checkpoint import Checkpoint
from draftwell.serving.artifacts.base import Provenance, digest_of
from draftwell.serving.artifacts.distilled_draft import DistilledDraft, lent_names
from draftwell.serving.runtime.model_files import build_distilled
from tests.support.errors import raises_code
from tests.support.models.families import some_prompts, target_pair, tiny_source, tiny_target
from tests.support.paths import REPO

EOS = 2
DONOR = "d" * 64
SHIPPED = REPO / "registry" / "pairs" / "smollm2_135m"
STEADY = Recipe(
    layers=(0, 3),
    head_tokens=48,
    tokens=4000,
    batch_tokens=256,
    warmup_steps=5,
    peak_rate=5e-3,
    save_seconds=0.0,
    measure_steps=3,
)


def quiet(line: str) -> None:
    """Nothing is said."""


@pytest.fixture(scope="module")
def target():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config).eval()
    for p in model.parameters():
        # sharper than a fresh model, so that there is something to learn
        p.data *= 6.0 if p.ndim == 2 else 1.0
    return model


def writer(target: Any, features: tuple[int, ...] = ()) -> Writer:
    """Of a copy, which the engine gives attention of its own."""
    return Writer(target_pair(copy.deepcopy(target)), 8, features=features)


def write(target: Any, folder: Path, count: int = 96) -> list[Path]:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randrange(2, 9))] for _ in range(count)]
    return write_corpus(
        writer(target), prompts, folder, donor=DONOR, new_tokens=24, batch=16, say=quiet
    )


@pytest.fixture(scope="module")
def shards(target, tmp_path_factory) -> list[Path]:
    return write(target, tmp_path_factory.mktemp("corpus"))


def test_the_writer_writes_what_transformers_does(target):
    prompts = [[5, 6, 7, 8, 9, 10], [11], [12, 13, 14]]
    for prompt, (out, hidden) in zip(prompts, writer(target).greedy(prompts, 20), strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=20,
                do_sample=False,
                pad_token_id=EOS,
            )[0]
            states = target.model(expected[None, :-1]).last_hidden_state[0]
        assert out == expected[len(prompt) :].tolist()
        assert torch.allclose(hidden, states, atol=1e-4), "the states that training learns from"


def test_states_of_chosen_layers_come_with_the_last_ones(target):
    """As `output_hidden_states` has them: the states that enter a layer, residuals added."""
    ((out, hidden),) = writer(target).greedy([[5, 6, 7]], 8)
    ((same, states),) = writer(target, (1, 2)).greedy([[5, 6, 7]], 8)
    with torch.no_grad():
        seen = target.model(
            torch.tensor([[5, 6, 7, *out[:-1]]]), output_hidden_states=True
        ).hidden_states
    assert same == out
    assert torch.allclose(states, torch.cat([seen[1][0], seen[2][0], hidden], -1), atol=1e-4)


def test_samples_are_those_of_the_seed(target):
    rows, sampled = some_prompts(5), writer(target).sampled
    assert sampled(rows, 12, 0.9, 1) == sampled(rows, 12, 0.9, 1) != sampled(rows, 12, 0.9, 2)


class Asked(AbstractContextManager):
    """A governor that notes when it is asked, and when it is done with."""

    checks = ended = 0

    def check(self):
        self.checks += 1

    def __exit__(self, *_):
        self.ended += 1


def test_the_governor_is_asked_at_every_token_and_gives_the_threads_back_after_a_batch():
    asked: Any = Asked()
    writing = Writer(target_pair(tiny_target("llama")), 3, asked)
    [(output, _)] = writing.greedy([[5, 6, 7]], 12)
    assert asked.checks >= len(output) > 0
    assert asked.ended == 1
    writing.greedy([[5, 6, 7]], 4)
    assert asked.ended == 2


def test_a_rerun_keeps_finished_shards(target, tmp_path):
    shards = write(target, tmp_path)
    before = corpus_digest(read_corpus(shards))
    first, *rest = shards
    stamps = {p: p.stat().st_mtime_ns for p in rest}
    content = first.read_bytes()
    first.unlink()
    assert write(target, tmp_path) == shards
    assert first.read_bytes() == content
    assert {p: p.stat().st_mtime_ns for p in rest} == stamps
    assert corpus_digest(read_corpus(shards)) == before
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("harm", ["cut", "empty", "longer than its lengths"])
def test_a_damaged_shard_is_named_in_one_line(shards, tmp_path, harm):
    from safetensors.torch import load_file, save_file

    shard, whole = tmp_path / shards[1].name, shards[1].read_bytes()
    if harm == "longer than its lengths":
        save_file(load_file(shards[1]) | {"ids": torch.zeros(7, dtype=torch.int32)}, shard)
    else:
        shard.write_bytes({"cut": whole[:-9], "empty": b""}[harm])
    with raises_code("damaged_shard", shard.name, "run the same command again") as error:
        read_corpus([shards[0], shard])
    assert "\n" not in str(error.value)


def test_shards_of_other_inputs_are_not_mixed_in(target, tmp_path):
    """In one folder: other prompts, another target and other lengths get shards of their own."""
    whole = write(target, tmp_path)
    fewer = write(target, tmp_path, count=20)
    assert len(read_corpus(fewer)) == 20
    writing, prompts = writer(target), [[5, 6], [7]]
    paths = [
        write_corpus(writing, prompts, tmp_path, donor=donor, new_tokens=length, say=quiet)[0]
        for donor, length in (("d" * 64, 4), ("e" * 64, 4), ("d" * 64, 5))
    ]
    assert fewer[0] == whole[0], "of the same sixteen prompts"
    assert len({*whole, fewer[1], *paths}) == len(whole) + 4
    assert len(read_corpus(write(target, tmp_path))) == 96


def trained(
    target: Any, shards: list[Path], folder: Path, recipe: Recipe = STEADY, donor: str = DONOR
) -> tuple[Any, dict[str, Any]]:
    """A draft on the text of the shards, and what training returned."""
    corpus, draft = read_corpus(shards), keep_layers(target, recipe.layers)
    head = head_of(corpus, target, recipe.head_tokens)
    return draft, train_draft(draft, corpus, head, recipe, folder, donor=donor, say=quiet)


def test_total_variation_is_half_the_sum_of_differences(target, shards):
    """Weighted by position as the KL is: a prompt's positions count less."""
    recipe = replace(STEADY, loss="tv", hidden_weight=0.0)
    draft, group = keep_layers(target, (0, 3)), read_corpus(shards)[:2]
    head = head_of(group, target, 64)
    loss, parts = losses(draft, group, head, recipe)
    total = weights = 0.0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for s in group:
            mine = head(draft.model(s.ids[None]).last_hidden_state[0, 1:-1]).softmax(-1)
            theirs = head(s.hidden[1:]).softmax(-1)
            for i, row in enumerate((mine - theirs).abs().sum(-1).tolist(), 1):
                weight = 1.0 if i >= s.prompt - 1 else recipe.prompt_weight
                total, weights = total + weight * row / 2, weights + weight
    assert loss.item() == pytest.approx(parts["tv"])
    assert parts["tv"] == pytest.approx(total / weights, abs=0.01)


def test_states_of_other_layers_change_no_loss(target, tmp_path):
    """A draft may learn from a head's corpus."""
    prompts = some_prompts(4)
    found = []
    for features in ((), (1, 2)):
        folder = tmp_path / str(len(features))
        paths = write_corpus(
            writer(target, features), prompts, folder, donor=DONOR, new_tokens=9, say=quiet
        )
        corpus = read_corpus(paths)
        head = head_of(corpus, target, 64)
        found.append(losses(keep_layers(target, (0, 3)), corpus, head, STEADY)[1])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert corpus[0].hidden.shape[-1] == 3 * 32


def test_a_stopped_run_ends_as_an_unbroken_one(target, shards, tmp_path, monkeypatch):
    """Bit for bit: weights, moments, rate, order of the batches and the place in the pass are all
    resumed."""
    whole, expected = trained(target, shards, tmp_path / "whole")
    assert expected["passes"] >= 1, "the stops lie in more than one pass"
    curve = expected["curves"]["held_out_agreement"]
    assert curve[0][1] < expected["held_out_agreement"], "it has learned"
    real = Checkpoint.save
    for count in (8, 5):
        left = iter(range(count - 1))

        def stopping(*arguments: Any, left: Any = left) -> None:
            real(*arguments)
            if next(left, None) is None:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "save", stopping)
            with pytest.raises(KeyboardInterrupt):
                trained(target, shards, tmp_path / "broken")
    draft, found = trained(target, shards, tmp_path / "broken")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, draft.state_dict()[name]), name
    assert {**found, "minutes": 0} == {**expected, "minutes": 0}


def test_a_finished_run_returns_at_once(target, shards, tmp_path, monkeypatch):
    _, first = trained(target, shards, tmp_path)
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: pytest.fail("nothing is left to learn")
    )
    assert trained(target, shards, tmp_path)[1] == first


@pytest.mark.parametrize("changed", [{"layers": (0, 2)}, {"loss": "tv"}, {"donor": "e" * 64}])
def test_another_training_has_a_checkpoint_of_its_own(target, shards, tmp_path, changed):
    """In the same folder: the first one's is left as it is, and goes on with more time."""
    short = replace(STEADY, tokens=500)
    trained(target, shards, tmp_path, short)
    (kept,) = tmp_path.iterdir()
    before = kept.read_bytes()
    donor = changed.pop("donor", DONOR)
    trained(target, shards, tmp_path, replace(short, **changed), donor)
    assert len(list(tmp_path.iterdir())) == 2
    assert kept.read_bytes() == before
    assert trained(target, shards, tmp_path, replace(short, tokens=800))[1]["tokens"] >= 800
    assert len(list(tmp_path.iterdir())) == 2


def test_a_checkpoint_that_cannot_be_read(target, shards, tmp_path):
    corpus = [s for s in read_corpus(shards) if len(s.ids) > 2]
    ids = head_of(corpus, target, 48).ids
    path = checkpoint_on(corpus, tmp_path, STEADY, ids, DONOR).path
    path.write_bytes(b"no checkpoint at all, though long enough to be one")
    with raises_code("bad_checkpoint", path.name):
        trained(target, shards, tmp_path)


def test_too_little_text(target, shards, tmp_path):
    corpus = read_corpus(shards)[:1]
    draft, head = keep_layers(target, STEADY.layers), head_of(corpus, target, 48)
    with raises_code("too_little_text"):
        train_draft(draft, corpus, head, STEADY, tmp_path, donor=DONOR, say=quiet)


def test_distilling_from_prompts_to_an_artifact(tmp_path):
    """The whole way, with an agreement that an independent count finds too; a second run makes the
    same draft."""
    source = tiny_source("qwen2")
    artifact, report = distil_draft(source, STEADY, tmp_path, say=quiet)
    assert artifact.provenance.parameters["layers"] == "0,3"
    assert artifact.provenance.metrics["agreement"] == report["agreement"]["agreement"]
    artifact.save(tmp_path / "saved")
    module = tiny_target("qwen2")
    draft = build_distilled(DistilledDraft.load(tmp_path / "saved"), tiny_target("qwen2"))
    hits = count = 0
    for _, ids in source.untouched:
        prompt = torch.tensor([ids])
        with torch.no_grad():
            text = module.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
            )
            logits = torch.full((1, text.shape[1], 61), -torch.inf)
            logits[..., artifact.head_tokens] = draft(text).logits[..., artifact.head_tokens]
        said, wanted = logits[0].argmax(-1)[len(ids) - 1 : -1], text[0, len(ids) :]
        hits, count = hits + int((said == wanted).sum()), count + len(wanted)
    assert report["agreement"]["positions"] == count
    # a near-tie may fall either way
    assert report["agreement"]["agreement"] == pytest.approx(hits / count, abs=1.5 / count)
    again, _ = distil_draft(source, STEADY, tmp_path, say=quiet)
    again.save(tmp_path / "again")
    assert (
        digest_of(tmp_path / "again")
        == digest_of(tmp_path / "saved")
        == digest_of(tmp_path / "candidate")
    )


@pytest.mark.slow
def test_the_whole_recipe_of_the_default_pair_is_one_command(tmp_path, monkeypatch, capsys):
    """From prompts to draft, qualifier and head; what is there is not made again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftwell.components.distil import default_pair
    from draftwell.serving.artifacts.eagle3_head import Eagle3Head
    from tests.support.server.served_pair import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"the inn on the hand {i}"}) + "\n" for i in range(30))
        # fits the corpus, but not the target's 256 positions
        + json.dumps({"prompt": "the inn on the hand " * 40})
    )
    small = {
        "LAYERS": {"draft": (0, 6), "qualifier": (0, 1, 2, 6)},
        "MIDDLE": (1, 2),
        "MIDDLE_AT": 1,
        "INVENTED": 4,
    }
    for name, value in small.items():
        monkeypatch.setattr(default_pair, name, value)
    settings = {
        "target": tmp_path / "target",
        "prompts": str(prompts),
        "work": tmp_path / "work",
        "out": tmp_path / "out",
        "minutes": 0.003,
    }
    default_pair.main(**settings)
    said = capsys.readouterr().out
    assert [
        line.partition(":")[0] for line in said.splitlines() if " minutes of training," in line
    ] == ["draft", "qualifier", "head"]
    assert "prompts of more than 96 tokens are left out" in said
    draft, qualifier = (
        DistilledDraft.load(tmp_path / "out" / name) for name in ("draft", "qualifier")
    )
    head = Eagle3Head.load(tmp_path / "out" / "head")
    assert draft.provenance.parameters["started_from"] == "the target's layers"
    assert str(draft.provenance.parameters["output_tokens"]) in str(
        qualifier.provenance.parameters["started_from"]
    )
    assert qualifier.provenance.parameters["layers"] == "0,1,2,6"
    assert draft.donor == qualifier.donor == head.donor
    assert head.layers == (2, 3, 4)
    assert head.int8
    assert {"acceptance_depth_4", "accepted_length"} <= head.provenance.metrics.keys()
    assert head.provenance.fingerprint != draft.provenance.fingerprint, (
        "bound to the pair of target, draft and qualifier"
    )
    asked = set(hashes_of(Prompt("", None, [f"the inn on the hand {i}"]) for i in range(30)))
    for made in (draft, qualifier, head):
        assert (
            len(made.provenance.training_prompts) > made.provenance.parameters["conversations"] > 20
        ), "all that were asked, those that are too long too"
        assert set(made.provenance.training_prompts) > asked, "and what the target invented"

    shutil.rmtree(tmp_path / "out" / "head")
    default_pair.main(**settings)
    said = capsys.readouterr().out
    assert f"draft: in {tmp_path / 'out' / 'draft'} already" in said
    assert "tokens by the target" not in said, "nor is the text written again"
    assert (tmp_path / "out" / "head").is_dir()


def test_a_target_writes_within_the_positions_it_was_trained_for(target, tmp_path):
    """A head's rotary positions end there."""
    from draftwell.components.distil.distil import longest_prompt, target_alone
    from tests.support.server.served_pair import tiny_tokenizer

    target.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pair = target_alone("tiny", tmp_path, 160)
    assert pair.models["target"].max_context == 256
    assert longest_prompt(pair, 160) == 96
    with raises_code("no_room", "256 positions"):
        target_alone("tiny", tmp_path, 256)


def test_what_pads_a_batch_changes_nothing(target, shards, monkeypatch):
    group = sorted(read_corpus(shards), key=lambda s: len(s.ids))[3:9]
    head = head_of(group, target, 64)
    found = []
    for widths in (1, 32):
        monkeypatch.setattr(corpus, "WIDTHS", widths)
        draft = keep_layers(target, (0, 3))
        loss, parts = losses(draft, group, head, STEADY)
        loss.backward()
        found.append((parts, draft.model.layers[0].mlp.up_proj.weight.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    assert torch.allclose(found[0][1], found[1][1], rtol=0.02, atol=1e-4)


def test_padding_ends_where_learned_positions_do():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=97, n_positions=100, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=True
    )
    draft = GPT2LMHeadModel(config)
    text = corpus.Conversation(torch.randint(3, 97, (100,)), 5, torch.randn(99, 32).bfloat16())
    loss, _ = losses(draft, [text], head_of([text], draft, 64), STEADY)
    assert torch.isfinite(loss)


def test_no_prompt_that_fits(tmp_path):
    with raises_code("no_prompt_fits", "640"):
        distil_draft(replace(tiny_source("qwen2"), prompts=[]), STEADY, tmp_path, say=quiet)


def test_a_draft_on_another_device_copies_what_it_borrows(target, shards, tmp_path):
    draft = keep_layers(target, (0, 3))
    head = head_of(read_corpus(shards), target, 64)
    to_artifact(draft, head.ids, "d" * 64, Provenance(pair="tiny", fingerprint="f" * 64)).save(
        tmp_path / "draft"
    )
    loaded = build_distilled(DistilledDraft.load(tmp_path / "draft"), target, "meta")
    assert {p.device.type for p in loaded.parameters()} == {"meta"}
    assert {p.device.type for p in target.parameters()} == {"cpu"}


def test_rotary_frequencies_are_not_rounded(target, tmp_path):
    """In bfloat16 they are off by up to .2 %, which at a distance of 500 tokens is up to a
    radian."""
    from transformers import AutoModelForCausalLM

    target16 = AutoModelForCausalLM.from_config(target.config, dtype=torch.bfloat16)
    made = Provenance(pair="tiny", fingerprint="f" * 64)
    to_artifact(keep_layers(target, (0, 3)), torch.arange(5), "d" * 64, made).save(
        tmp_path / "draft"
    )
    loaded = build_distilled(DistilledDraft.load(tmp_path / "draft"), target16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.model.rotary_emb.inv_freq, target16.model.rotary_emb.inv_freq)
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("role", ["draft", "qualifier"])
def test_what_is_shipped_loads_as_it_always_did(role):
    """The files' numbers arrive unchanged in a module that borrows the rest, under the names that
    were once written out."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (SHIPPED / role).is_dir():
        pytest.skip(f"no {role} is shipped")
    shipped = DistilledDraft.load(SHIPPED / role)
    raw = load_file(SHIPPED / role / "draft.safetensors")
    settings = {**shipped.config, "num_hidden_layers": 1}
    donor = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings)
    )
    built = build_distilled(shipped, donor)
    assert lent_names(built) == {"model.embed_tokens.weight", "lm_head.weight"}
    state = built.state_dict()
    assert state.keys() - shipped.state.keys() == lent_names(built)
    for name in shipped.state:
        stored = (
            raw[name].float() * raw[f"{name}.scale"][:, None]
            if raw[name].dtype == torch.int8
            else raw[name]
        )
        assert torch.equal(state[name], stored), name


def test_agreement_of_a_model_with_itself_is_one(target):
    from draftwell.serving.runtime.models.transformers_model import TransformersModel
    from draftwell.serving.runtime.pair import LoadedPair

    models = {
        "target": TransformersModel(copy.deepcopy(target)),
        "draft": TransformersModel(copy.deepcopy(target)),
    }
    tokenizer = type("Tokenizer", (), {"eos_token_id": EOS, "all_special_ids": [EOS]})()
    pair = LoadedPair("tiny", "float32", "cpu", models, {"target": target}, tokenizer, "f" * 64)
    found = agreement(pair, [("a", [5, 6, 7]), ("b", [8])], max_tokens=12)
    assert found["agreement"] == 1.0
    assert found["tasks"] == {"a": 1.0, "b": 1.0}
    assert found["positions"] <= 24


def test_batches_cover_every_conversation_once_within_the_budget():
    conversations = [
        Conversation(torch.arange(n), 1, torch.zeros(n - 1, 1)) for n in [3, 50, 7, 20, 9, 31, 12]
    ]
    groups = list(batches(conversations, 60, random.Random(1)))
    assert sorted(len(c.ids) for g in groups for c in g) == sorted(
        len(c.ids) for c in conversations
    )
    assert all(len(g) == 1 or max(len(c.ids) for c in g) * len(g) <= 60 for g in groups)


def test_head_covers_what_the_target_emits_most():
    text = Conversation(torch.tensor([9, 9, 9, 4, 4, 5]), 3, torch.zeros(5, 1))
    assert frequent_tokens([text], 2, 12).tolist() == [4, 5], "prompt tokens only break ties"
    assert frequent_tokens([text], 3, 12).tolist() == [4, 5, 9]


def test_a_draft_grows_without_a_change_and_every_new_layer_can_learn(target):
    torch.manual_seed(0)
    shallow, ids = keep_layers(target, (0, 3)), torch.randint(3, 97, (2, 12))
    for parameter in shallow.model.layers.parameters():
        # a trained draft is no longer the target's layers
        parameter.data += 0.1 * torch.randn_like(parameter)
    deep = grow(shallow, target, (1, 2), at=1)
    torch.testing.assert_close(deep(ids).logits, shallow(ids).logits)
    assert deep.config.num_hidden_layers == 4
    torch.testing.assert_close(
        deep.model.layers[3].mlp.up_proj.weight, shallow.model.layers[1].mlp.up_proj.weight
    )
    deep(ids).logits.logsumexp(-1).sum().backward()
    assert all(layer.self_attn.o_proj.weight.grad.abs().sum() > 0 for layer in deep.model.layers)


class Spoken:
    """A writer that notes what it was asked to continue."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode, self.heard = decode, list[str]()

    def sampled(self, rows: Any, new_tokens: int, temperature: float, seed: int) -> list[list[int]]:
        assert temperature > 0
        self.heard += [self.decode(row) for row in rows]
        return [[60 + i % 3 for i in range(new_tokens)] for _ in rows]


@pytest.mark.parametrize("chat", [True, False])
def test_invented_instructions_begin_where_a_user_would(chat):
    from tests.support.server.served_pair import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    spoken: Any = Spoken(tokenizer.decode)
    made = invent(spoken, tokenizer, 60, chat=chat)
    assert len(spoken.heard) == 60
    head = before_a_user(tokenizer)
    assert all(heard.startswith(head) == chat for heard in spoken.heard)
    assert len(set(made)) == len(made) > 20
    assert any(text.startswith("Explain") for text in made)
    turn = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, tokenize=False
    ).startswith(head + "Hello")
