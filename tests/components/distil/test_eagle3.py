"""EAGLE-3 heads on a tiny target: the unrolled training is the drafting that follows, training
learns and resumes, the artifact loads."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwell.components.distil import corpus as corpus_module
from draftwell.components.distil.corpus import (
    Conversation,
    frequent_tokens,
    hold_out,
    read_corpus,
    write_corpus,
)
from draftwell.components.distil.eagle3.distil import distil_head
from draftwell.components.distil.eagle3.measure import reach
from draftwell.components.distil.eagle3.network import (
    Eagle3Network,
    default_features,
    head_config,
    rotate,
)
from draftwell.components.distil.eagle3.start import (
    check_startable,
    entering_last,
    start_from_target,
)
from draftwell.components.distil.eagle3.training import (
    HeadRecipe,
    head_losses,
    spread_of,
    train_head,
)
from draftwell.components.distil.eagle3.unroll import Batch, Starts, unroll
from draftwell.components.distil.family import Head
from draftwell.components.distil.writers import Writer
from draftwell.components.train.checkpoint import Checkpoint
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from tests.support.errors import raises_code
from tests.support.models.families import target_pair

LAYERS, STEPS = (1, 2, 3), 4


def quiet(line: str) -> None:
    """Nothing is said."""


@pytest.fixture(scope="module")
def target() -> Any:
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
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    for p in model.parameters():
        # sharper than a fresh model, so that there is something to learn
        p.data *= 6.0 if p.ndim == 2 else 1.0
    return model


@pytest.fixture(scope="module")
def shards(target: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randrange(2, 9))] for _ in range(96)]
    return write_corpus(
        Writer(target_pair(copy.deepcopy(target)), 8, features=LAYERS),
        prompts,
        tmp_path_factory.mktemp("corpus"),
        donor="d" * 64,
        new_tokens=24,
        batch=16,
        say=quiet,
    )


@pytest.fixture(scope="module")
def corpus(shards: list[Path]) -> list[Conversation]:
    return read_corpus(shards)


@pytest.fixture
def network(target: Any) -> Eagle3Network:
    torch.manual_seed(1)
    embeddings = target.get_input_embeddings().weight.detach()
    made = Eagle3Network(head_config(target.config, 48, LAYERS), embeddings)
    for p in made.parameters():
        p.data = torch.randn_like(p) * (0.3 if p.ndim == 2 else 0.2) + (1.0 if p.ndim == 1 else 0.0)
    return made


class Drafter:
    """A head that drafts token by token over a cache that grows, written out for one index after
    another."""

    def __init__(self, network: Eagle3Network, target: Any):
        self.network, self.embeddings = network, target.get_input_embeddings().weight.detach()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def step(self, state: torch.Tensor, token: int, position: int) -> torch.Tensor:
        """Output before the norm, `[hidden]`, of one index; its key and value join the cache."""
        layer, attention = self.network.midlayer, self.network.midlayer.self_attn
        x = torch.cat([layer.input_layernorm(self.embeddings[token]), layer.hidden_norm(state)])
        cos, sin = self.network.cos[position], self.network.sin[position]
        query = rotate(attention.q_proj(x).view(-1, attention.head_dim), cos, sin)
        self.keys.append(rotate(attention.k_proj(x).view(-1, attention.head_dim), cos, sin))
        self.values.append(attention.v_proj(x).view(-1, attention.head_dim))
        seen = []
        for head in range(attention.heads):
            mine = head // (attention.heads // attention.kv_heads)
            keys, values = (
                torch.stack([each[mine] for each in cached]) for cached in (self.keys, self.values)
            )
            seen.append((keys @ query[head] / attention.head_dim**0.5).softmax(-1) @ values)
        state = state + attention.o_proj(torch.cat(seen))
        return state + layer.mlp(layer.post_attention_layernorm(state))


@torch.no_grad()
def drafted(
    network: Eagle3Network, target: Any, text: Conversation, index: int
) -> list[torch.Tensor]:
    """Outputs of the steps from an index, reading the text itself as what was drafted; states of
    the target up to there."""
    drafter, hidden = Drafter(network, target), network.config["hidden_size"]
    output = torch.empty(0)
    for i in range(index + 1):
        output = drafter.step(network.fc(text.hidden[i, : 3 * hidden]), int(text.ids[i + 1]), i)
    outputs = [output]
    for step in range(1, min(STEPS, len(text.ids) - 2 - index)):
        outputs.append(
            output := drafter.step(output, int(text.ids[index + 1 + step]), index + step)
        )
    return outputs


@torch.no_grad()
def furthest(network: Eagle3Network, target: Any, group: list[Conversation]) -> float:
    """Largest difference between drafting and the unrolled forward, over all indices and steps of a
    batch."""
    batch = Batch.of(group)
    starts = Starts.of(batch, batch.prompt[:, None] * 0)
    outputs = list(unroll(network, batch, batch.features, starts, STEPS))
    worst, compared = 0.0, 0
    for row, text in enumerate(group):
        for index in range(len(text.ids) - 2):
            for step, expected in enumerate(drafted(network, target, text, index)):
                worst = max(worst, float((outputs[step][row, index] - expected).abs().max()))
                compared += 1
    assert compared > 150
    return worst


def test_training_unrolls_what_drafting_does(network, target, corpus):
    """At every index and step, in a batch with padding: the same keys, rotary positions, embeddings
    and states."""
    shortest = sorted(corpus[:32], key=lambda s: s.prompt)
    group = list({len(s.ids): s for s in shortest}.values())[:3]
    assert len({len(s.ids) for s in group}) > 1
    assert furthest(network, target, group) < 1e-4


STEADY = HeadRecipe(
    layers=LAYERS,
    head_tokens=48,
    tokens=6000,
    batch_tokens=256,
    warmup_steps=5,
    peak_rate=5e-3,
    save_seconds=0.0,
    measure_steps=7,
)


def begun(
    target: Any, corpus: list[Conversation], recipe: HeadRecipe = STEADY
) -> tuple[Eagle3Network, Head]:
    """A head at its start, and the target's over the tokens that it covers."""
    head = Head.of(target, frequent_tokens(corpus, recipe.head_tokens, 97))
    config = head_config(target.config, len(head.ids), LAYERS)
    network = Eagle3Network(config, target.get_input_embeddings().weight.detach())
    start_from_target(network, target, corpus)
    return network, head


def test_training_learns(target, corpus, tmp_path):
    recipe = replace(STEADY, tokens=15_000, save_seconds=1e9, measure_steps=20)
    network, head = begun(target, corpus)
    before = reach(network, corpus[:20], head, recipe.steps)
    found = train_head(network, corpus, head, recipe, tmp_path, donor="d", say=quiet)
    after = reach(network, corpus[:20], head, recipe.steps)
    losses = [value for _, value in found["curves"]["loss"]]
    assert losses[-1] < 0.85 * losses[0]
    assert after.length > before.length + 0.3
    assert len(found["acceptance"]) == recipe.steps
    assert {
        "sample_acceptance_depth_1",
        "sample_acceptance_depth_4",
        "sample_acceptance",
        "sample_accepted_length",
        "kl_4",
    } <= found["curves"].keys()
    assert found["curves"]["sample_accepted_length"][-1][0] == found["steps"] // 20 * 20


def test_acceptance_is_that_of_drafting(network, target, corpus):
    """Counted draft by draft: a draft starts behind each token that the target wrote, and ends with
    its first wrong token."""
    head = Head.of(target, torch.arange(0, 97, 2))
    held = corpus[:6]
    right, tried = [0] * STEPS, [0] * STEPS
    for text in held:
        for index in range(text.prompt - 1, len(text.ids) - 2):
            for step, output in enumerate(drafted(network, target, text, index)):
                said = head.ids[(head.weight.float() @ network.norm(output)).argmax()]
                tried[step] += 1
                right[step] += (hit := bool(said == text.ids[index + 2 + step]))
                if not hit:
                    break
    found = reach(network, held, head, STEPS)
    assert found.positions == tried[0] > 50
    for share, r, t in zip(found.depths, right, tried, strict=True):
        assert share == pytest.approx(r / max(1, t), abs=2 / max(1, t)), (
            "a near-tie may fall either way: products are in bfloat16"
        )


def test_a_stopped_run_ends_as_an_unbroken_one(target, corpus, tmp_path, monkeypatch):
    """Bit for bit: weights, moments, rate, noise, order of the batches and the place in the pass
    are all resumed."""

    def trained(folder: Path) -> tuple[Eagle3Network, dict[str, Any]]:
        network, head = begun(target, corpus)
        return network, train_head(network, corpus, head, STEADY, folder, donor="d", say=quiet)

    whole, expected = trained(tmp_path / "whole")
    assert expected["passes"] >= 1, "the stop lies in more than one pass"
    real, seen = Checkpoint.save, [0]

    def stopping(*arguments: Any) -> None:
        real(*arguments)
        seen[0] += 1
        if seen[0] == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", stopping)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "broken")
    network, found = trained(tmp_path / "broken")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name]), name
    assert {**found, "minutes": 0} == {**expected, "minutes": 0}


def test_each_training_has_a_checkpoint_of_its_own():
    """More time continues one; another setting that weights depend on begins another."""
    assert replace(STEADY, tokens=None, minutes=9.0).identity() == STEADY.identity()
    for name, value in {"steps": 2, "seed": 1, "peak_rate": 1e-3, "noise": 0.2}.items():
        assert replace(STEADY, **{name: value}).identity() != STEADY.identity()


def test_a_repeated_prompt_is_not_held_out_and_learned_from():
    def said(prompt: int, answer: int) -> Conversation:
        return Conversation(torch.tensor([prompt, answer]), 1, torch.zeros(1, 4))

    corpus = [said(prompt, answer) for answer in range(3) for prompt in range(60)]
    held, learned = hold_out(corpus)
    assert [(int(s.ids[0]), int(s.ids[1])) for s in held] == [
        (p, a) for a in range(3) for p in (0, 50)
    ]
    assert len(held) + len(learned) == len(corpus)
    assert not {int(s.ids[0]) for s in held} & {int(s.ids[0]) for s in learned}
    assert [int(s.ids[0]) for s in hold_out(corpus[:60])[0]] == [0, 50], (
        "of different prompts each fiftieth"
    )


@pytest.mark.parametrize("kind", ["qwen3", "phi3", "gemma2"])
def test_targets_that_a_head_cannot_start_from_are_refused_before_any_text(kind, tmp_path):
    """They have all that the engine runs, but not the layer that a head begins as."""
    source: Any = SimpleNamespace(
        prompts=[[3]], target=SimpleNamespace(modules={"target": other_target(kind)})
    )
    with raises_code("unsupported_architecture", kind):
        distil_head(source, STEADY, tmp_path, say=quiet)
    assert not list(tmp_path.iterdir())


def other_target(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
        **changes,
    )
    module = AutoModelForCausalLM.from_config(config).eval()
    for name, p in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.5)
    return module


def test_too_little_text(target, corpus, tmp_path):
    network, head = begun(target, corpus)
    with raises_code("too_little_text"):
        train_head(network, corpus[:1], head, STEADY, tmp_path, donor="d", say=quiet)


def test_every_weight_learns_without_prompts_too(target, corpus):
    network, head = begun(target, corpus)
    recipe = replace(STEADY, prompt_weight=0.0)
    loss, parts = head_losses(
        network, corpus[:8], head, recipe, spread_of(corpus), torch.Generator()
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert parts.keys() == {"loss", "kl_1", "kl_2", "kl_3", "kl_4"}
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


def test_what_pads_a_batch_changes_nothing(target, corpus, monkeypatch):
    network, head = begun(target, corpus)
    recipe = replace(STEADY, noise=0.0, prompt_weight=0.0)
    group = sorted(corpus, key=lambda s: len(s.ids))[3:9]
    found = []
    for widths in (1, 32):
        monkeypatch.setattr(corpus_module, "WIDTHS", widths)
        network.zero_grad()
        loss, _ = head_losses(network, group, head, recipe, torch.ones(96), torch.Generator())
        loss.backward()
        reached = reach(network, group, head, recipe.steps)
        found.append((float(loss.detach()), network.fc.weight.grad.clone(), reached))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    assert torch.allclose(found[0][1], found[1][1], rtol=0.05, atol=1e-3)
    assert found[0][2].positions == found[1][2].positions
    assert found[0][2].depths == pytest.approx(found[1][2].depths)


def test_a_text_as_long_as_the_positions(target, corpus):
    """What pads it lies behind the last rotary position."""
    ids = torch.cat([s.ids for s in corpus])[:100]
    text = Conversation(ids, 3, torch.randn(99, 4 * 32).bfloat16())
    embeddings = target.get_input_embeddings().weight.detach()
    config = {**head_config(target.config, 48, LAYERS), "max_position_embeddings": 100}
    network = Eagle3Network(config, embeddings)
    assert Batch.of([text]).indices > len(network.cos) == 100
    head = Head.of(target, torch.arange(48))
    loss, _ = head_losses(network, [text], head, STEADY, torch.ones(96), torch.Generator())
    assert torch.isfinite(loss)


def test_a_shallow_target_is_refused():
    assert default_features(30) == (2, 15, 27)
    with raises_code("too_shallow", "6"):
        default_features(6)


@pytest.fixture
def head(network: Eagle3Network) -> Eagle3Head:
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    made = Provenance(pair="tiny", fingerprint="f" * 64, metrics={"accepted_length": 1.5})
    return Eagle3Head(state, network.config, torch.arange(1, 97, 2), LAYERS, "d" * 64, made)


def test_a_head_survives_a_round_trip(head, network, tmp_path):
    digest = head.save(tmp_path / "head")
    again = Eagle3Head.load(tmp_path / "head", fingerprint="f" * 64)
    assert again.save(tmp_path / "again") == digest
    assert torch.equal(again.head_tokens, head.head_tokens)
    assert (again.layers, again.donor, again.config) == (LAYERS, "d" * 64, network.config)
    Eagle3Network(again.config).load_state_dict(again.state)
    again.check_donor("d" * 64)
    with raises_code("another_donor", "e" * 12):
        again.check_donor("e" * 64)
    other = again.bound_to("other", "e" * 64)
    assert (other.provenance.fingerprint, again.provenance.fingerprint) == ("e" * 64, "f" * 64)
    assert other.save(tmp_path / "other") == digest, (
        "a digest is over what the head is, not over whose it is"
    )


@pytest.mark.parametrize("tokens", [torch.arange(47), torch.arange(48).flip(0)])
def test_tokens_that_do_not_fit_are_refused(head, tokens):
    with raises_code("bad_head", "ascending"):
        Eagle3Head(head.state, head.config, tokens, LAYERS, "d" * 64, head.provenance)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {}), ("qwen2", {}), ("llama", {"rope_parameters": LLAMA3})],
)
def test_states_of_targets_that_a_head_starts_from(kind, changes):
    """Of Llama, with scaled rotary positions too, and of Qwen 2, whose configuration names no size
    of a head."""
    module = other_target(kind, **changes)
    check_startable(module)
    ids = torch.arange(3, 43)
    with torch.no_grad():
        expected = module.model(ids[None], output_hidden_states=True).hidden_states[-2][0]
    (found,) = entering_last(module, [ids])
    assert float((found - expected).norm() / expected.norm()) < 0.1, (
        "bfloat16 is 0.03 off, other rotary positions 0.6"
    )
    corpus = [Conversation(ids, 3, torch.randn(39, 4 * 32))]
    start_from_target(Eagle3Network(head_config(module.config, 48, LAYERS)), module, corpus)


def test_a_head_in_8_bits_is_half_as_large_and_saves_to_the_same_bytes(head, tmp_path):
    small = Eagle3Head(
        head.state, head.config, head.head_tokens, LAYERS, "d" * 64, head.provenance, int8=True
    )
    head.save(tmp_path / "whole")
    digest = small.save(tmp_path / "small")
    loaded = Eagle3Head.load(tmp_path / "small")
    assert loaded.int8
    assert loaded.save(tmp_path / "again") == digest, "rounding what is rounded changes nothing"
    for name, tensor in head.state.items():
        assert torch.allclose(
            loaded.state[name].float(), tensor.float(), atol=float(tensor.float().abs().max()) / 100
        ), name
    sizes = [
        (tmp_path / folder / "model.safetensors").stat().st_size for folder in ("small", "whole")
    ]
    assert sizes[0] < 0.7 * sizes[1]


def test_the_standalone_folder_is_what_vllm_reads(head, target, tmp_path):
    """Names and shapes of `LlamaForCausalLMEagle3`, ids by their shift, and a configuration that
    transformers reads."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    rows = target.lm_head.weight[head.head_tokens]
    head.write_standalone(tmp_path, rows)
    tensors, config = (
        load_file(tmp_path / "model.safetensors"),
        json.loads((tmp_path / "config.json").read_text()),
    )
    layer = "midlayer."
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": [32, 96],
        "norm.weight": [32],
        "lm_head.weight": [48, 32],
        "d2t": [48],
        "t2d": [97],
        layer + "self_attn.q_proj.weight": [32, 64],
        layer + "self_attn.k_proj.weight": [16, 64],
        layer + "self_attn.v_proj.weight": [16, 64],
        layer + "self_attn.o_proj.weight": [32, 32],
        layer + "mlp.gate_proj.weight": [64, 32],
        layer + "mlp.up_proj.weight": [64, 32],
        layer + "mlp.down_proj.weight": [32, 64],
        layer + "input_layernorm.weight": [32],
        layer + "hidden_norm.weight": [32],
        layer + "post_attention_layernorm.weight": [32],
    }
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype, tensors["fc.weight"].dtype) == (
        torch.int64,
        torch.bool,
        torch.bfloat16,
    )
    assert torch.equal(torch.arange(48) + tensors["d2t"], head.head_tokens)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], head.head_tokens)
    assert torch.equal(tensors["lm_head.weight"], rows.bfloat16())
    read = AutoConfig.for_model(**config)
    assert (read.architectures, read.num_hidden_layers, read.draft_vocab_size) == (
        ["LlamaForCausalLMEagle3"],
        1,
        48,
    )
    assert read.rope_parameters["rope_theta"] == target.config.rope_parameters["rope_theta"]
    assert (read.tie_word_embeddings, read.head_dim) == (False, 8)
    with raises_code("bad_head", "rows"):
        head.write_standalone(tmp_path, rows[1:])


def test_other_layers_are_named_for_both_servers(target):
    """vLLM counts the layer that states enter, SGLang the one that they leave; the default is left
    to them."""
    config = head_config(target.config, 48, LAYERS)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    deep = copy.copy(target.config)
    deep.num_hidden_layers = 30
    assert (
        not {"eagle_config", "eagle_aux_hidden_state_layer_ids"}
        & head_config(deep, 48, (2, 15, 27)).keys()
    )
