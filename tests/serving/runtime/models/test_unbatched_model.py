"""Models with attention code of their own: their caches, fed in pieces, rolled back, forked and
shared, equal one forward over the text."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.errors import ContextTooLong
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.models.unbatched_model import UnbatchedModel
from draftwell.serving.runtime.pair import LoadSettings, load_pair, over_slots
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.cases import quick_only
from tests.support.errors import raises_code
from tests.support.models.eight_requests import check_together, requests
from tests.support.models.resources import NEEDED, random_datastore, table_resources
from tests.support.models.slot_steps import CONTEXT, COUNT, STEPS, run_step
from tests.support.models.tiny import VOCAB
from tests.support.models.unbatched_families import FAMILIES, HIDDEN, LIMIT, config, module_of
from tests.support.server.served_pair import tiny_tokenizer

TEXTS = [[(7 * i + 3 * n) % VOCAB for i in range(n)] for n in (19, 24, 15)]


def eager(name: str, module: Any) -> Any:
    """The same weights under transformers' plain attention, without a cache."""
    plain = module_of(name, attn_implementation="eager")
    plain.load_state_dict(module.state_dict())
    return plain


def noisy(module: Any, noise: float = 0.03) -> Any:
    """A draft that agrees with the module often, not always."""
    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.base_model.h.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * noise
    return other


def worst(name: str, adapter: Any) -> tuple[float, float]:
    """Largest difference of logits and of hidden states between pieces with rejected drafts between
    them and one eager forward."""
    module = module_of(name)
    with torch.no_grad():
        wanted = [
            eager(name, module)(torch.tensor([text]), output_hidden_states=True, use_cache=False)
            for text in TEXTS
        ]
    model = adapter(module, slots=3)
    slots = [model.open() for _ in TEXTS]
    seen: list[list[Any]] = [[], [], []]
    at = [0, 0, 0]
    for pieces in ((3, 9, 1), (4, 1, 5), (1, 8, 2), (11, 6, 7)):
        rows = []
        for i, piece in enumerate(pieces):
            rows.append(Forward("target", slots[i], tuple(TEXTS[i][at[i] : at[i] + piece]), piece))
            at[i] += piece
        for i, output in enumerate(model.forward(rows)):
            seen[i].append(output)
        # drafts that are rejected
        model.forward(
            [Forward("target", slots[0], (7, 7, 7, 7), 2), Forward("target", slots[2], (9,))]
        )
        model.rollback(slots[0], at[0] + 1)
        model.rollback(slots[0], at[0])
        model.rollback(slots[2], at[2])
    differences = [
        (
            torch.cat([o.logits for o in parts]) - want.logits[0],
            torch.cat([o.states for o in parts]) - want.hidden_states[-1][0],
        )
        for parts, want in zip(seen, wanted, strict=True)
    ]
    return max(float(d.abs().max()) for d, _ in differences), max(
        float(d.abs().max()) for _, d in differences
    )


class NeverCropped(UnbatchedModel):
    """The naive adapter: a rollback lowers the length and leaves what was rejected in the cache."""

    def rollback(self, slot: int, length: int) -> None:
        Slots.rollback(self.slots, slot, length)


class CroppedTooFar(UnbatchedModel):
    """One key and value too few behind every rollback."""

    def rollback(self, slot: int, length: int) -> None:
        super().rollback(slot, length)
        for layer in self.slots.cache(slot).layers:
            layer.crop(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_and_rollbacks_equal_one_forward_over_the_text(name):
    logits, hidden = worst(name, over_slots)
    assert logits < 2e-5
    assert hidden < 2e-5


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("naive", [NeverCropped, CroppedTooFar])
def test_a_wrong_rollback_shows(name, naive):
    assert min(worst(name, naive)) > 0.01


@pytest.mark.parametrize("name", ["gpt_neo", "gptj", "codegen", "bloom"])
@settings(max_examples=8, suppress_health_check=[HealthCheck.differing_executors], deadline=None)
@given(steps=STEPS)
def test_a_slot_is_the_text_that_it_holds(name, steps):
    """Whatever was opened, fed, rolled back, forked and closed."""
    model, plain = long_lived(name)
    held: dict[int, list[int]] = {}
    branches: set[int] = set()
    try:
        for action, *arguments in steps:
            run_step(model, plain, held, branches, action, arguments)
            assert {slot: model.slots.cache(slot).get_seq_length() for slot in held} == {
                slot: len(text) for slot, text in held.items()
            }
    finally:
        for slot in held:
            model.close(slot)


@functools.cache
def long_lived(name: str) -> tuple[Any, Any]:
    module = module_of(name)
    return UnbatchedModel(module, slots=COUNT, max_context=CONTEXT), eager(name, module)


@functools.cache
def modules() -> dict[str, Any]:
    target = module_of("gpt_neo")
    return {"target": target, "draft": noisy(target), "qualifier": noisy(target, 0.02)}


def networks(adapter: Any = over_slots) -> Engine:
    return Engine({role: adapter(module, slots=8) for role, module in modules().items()})


def generated(module: Any, prompt: list[int], tokens: int, **settings: Any) -> list[int]:
    """What `transformers.generate` writes greedily."""
    ids = torch.tensor([prompt])
    out = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **settings
    )
    return list(out[0, len(prompt) :].tolist())


PROMPTS = [[5, 9, 11, 4, 20], [3], [8, 8, 17, 6, 12, 21, 10, 4, 19]]


@pytest.mark.parametrize(
    ("strategy", "parameters"),
    [("autoregressive", {}), ("vanilla_sd", {"num_speculative_tokens": 3})],
)
def test_gpt_neo_writes_what_generate_writes(strategy, parameters):
    engine = networks()
    for prompt in PROMPTS:
        job = engine.generate(
            prompt,
            Sampling(max_tokens=40),
            build_strategy(strategy, parameters, table_resources(HIDDEN)),
        )
        assert job.output == generated(modules()["target"], prompt, 40, eos_token_id=None)
        if strategy == "vanilla_sd":
            assert 0 < job.session.stats.accepted < job.session.stats.drafted, (
                "drafts were kept and rejected"
            )


@pytest.mark.parametrize(
    ("name", "temperature"),
    quick_only(
        [
            (name, temperature)
            for name, strategy in STRATEGIES.items()
            if strategy.lossless and name != "eagle3"
            for temperature in (0.0, 1.0)
        ],
        # a serial, an overlapping and a branching strategy
        ("vanilla_sd", 0.0),
        ("spide", 1.0),
        ("duo_decoding", 0.0),
    ),
)
def test_eight_requests_write_what_each_writes_alone(name, temperature):
    """All but the head's: these models keep no states for one
    (`test_targets_that_keep_no_states_say_so`)."""
    engine = networks()
    wanted = requests(VOCAB, temperature)
    resources = table_resources(HIDDEN, datastore=random_datastore(VOCAB))

    def build() -> Any:
        return build_strategy(name, NEEDED.get(name, {}), resources)

    check_together(engine, build, wanted)


@pytest.mark.parametrize("broken_layer", [0, 1])
def test_a_forward_that_fails_half_way_leaves_the_cache_as_it_was(monkeypatch, broken_layer):
    """At layer 0 only one layer's cache has grown, at layer 1 both."""
    module = module_of("gpt_neo")
    model = UnbatchedModel(module, slots=2)
    first, second = model.open(), model.open()
    model.forward([Forward("target", first, (5, 6, 7)), Forward("target", second, (8, 9))])

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("half-way")

    with monkeypatch.context() as broken:
        broken.setattr(module.transformer.h[broken_layer].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="half-way"):
            model.forward([Forward("target", first, (10, 11)), Forward("target", second, (12,))])
    with torch.no_grad():
        expected = module(torch.tensor([[5, 6, 7, 4]])).logits[0, -1]
    assert torch.allclose(
        model.forward([Forward("target", first, (4,))])[0].logits[0], expected, atol=2e-5
    )
    assert [layer.get_seq_length() for layer in model.slots.cache(second).layers] == [2, 2]


def test_a_closed_slot_keeps_no_memory():
    model = UnbatchedModel(module_of("gpt_neo"))
    slot = model.open()
    model.forward([Forward("target", slot, (5, 6, 7))])
    model.close(slot)
    assert model.open() == slot
    assert model.slots.cache(slot).get_seq_length() == 0


def test_no_slot_is_longer_than_the_tables_of_positions():
    model = UnbatchedModel(module_of("gpt_neo"), max_context=4096)
    assert model.max_context == LIMIT
    assert UnbatchedModel(module_of("bloom"), max_context=64).max_context == 64
    with pytest.raises(ContextTooLong):
        Engine({"target": model}).submit(
            [5] * 100, Sampling(max_tokens=29), build_strategy("autoregressive")
        )


def recurrent() -> list[Any]:
    import transformers as tf

    plain = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = plain | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return [
        tf.MambaConfig(**plain, state_size=4),
        tf.RecurrentGemmaConfig(**heads, lru_width=HIDDEN),
        tf.Lfm2Config(**heads, layer_types=["conv", "full_attention"]),
        tf.GraniteMoeHybridConfig(
            **heads, layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_head=16
        ),
    ]


@pytest.mark.parametrize("config", recurrent(), ids=lambda config: config.model_type)
def test_recurrent_models_are_refused_by_name(config):
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(config)
    for adapter in (over_slots, TransformersModel, UnbatchedModel):
        with raises_code(
            "unsupported_architecture", config.model_type, "recurrent state"
        ) as caught:
            adapter(module)
        assert "\n" not in str(caught.value)


def test_an_architecture_that_was_not_checked_is_refused():
    from transformers import AutoModelForCausalLM, OpenAIGPTConfig

    module = AutoModelForCausalLM.from_config(
        OpenAIGPTConfig(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=1, n_head=4, n_positions=32)
    )
    with raises_code("unsupported_architecture", "openai-gpt", "compared"):
        over_slots(module)
    with raises_code("unsupported_architecture", "openai-gpt", "checked"):
        UnbatchedModel(module)


def test_falcon_with_alibi_is_refused_because_the_library_disagrees_with_itself():
    with raises_code("unsupported_architecture", "falcon", "ALiBi"):
        over_slots(module_of("falcon_alibi"))


def test_a_gpt_neo_pair_from_files(tmp_path: Path):
    """What the catalogue's pair gpt-neo-125m-1.3b goes through, with tiny weights."""
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config("gpt_neo", len(tokenizer))).eval()
    saved = {"target": target, "draft": noisy(target)}
    for role, module in saved.items():
        module.save_pretrained(tmp_path / role)
        tokenizer.save_pretrained(tmp_path / role)
    pair = load_pair(
        PairFiles("tiny", tmp_path / "target", tmp_path / "draft"),
        LoadSettings(dtype="float32", slots=2),
        chat=False,
    )
    assert {type(model) for model in pair.models.values()} == {UnbatchedModel}
    prompt = pair.encode_prompt("the man in the inn")
    engine = pair.engine()
    for strategy in ("autoregressive", "vanilla_sd", "prompt_lookup"):
        job = engine.generate(prompt, Sampling(max_tokens=30), build_strategy(strategy))
        assert job.output == generated(target, prompt, 30, eos_token_id=None)
