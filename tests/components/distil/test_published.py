"""Heads in the layouts that EAGLE, SGLang and speculators publish draft what their definition says,
and cost no losslessness."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from draftwell.components.distil.eagle3.published import read_published
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.eagle3_model import head_of
from draftwell.serving.runtime.pair import over_slots
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.errors import raises_code
from tests.support.models.llama_shapes import LLAMA3, llama, plain_logits, random_tokens
from tests.support.models.resources import ORIGIN

LAYERS, HIDDEN, VOCAB, COVERED = 8, 32, 61, 40
"""Of the target; a head covers some of its tokens."""
HEADS, KV_HEADS, HEAD_DIM, WIDE = 4, 2, 8, 48
EPS = 1e-5
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "model_type": "llama",
}
TEXT = random_tokens(12, 4)


def random_head(*, embeddings: bool = False, norms: int = 0, covered: int = COVERED) -> dict:
    """Tensors of a head by the names of EAGLE's own files, `d2t` as offsets."""
    generator = torch.Generator().manual_seed(9)

    def of(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def ones(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (WIDE, HIDDEN),
        "mlp.up_proj": (WIDE, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDE),
    }
    found = {f"midlayer.{name}.weight": of(*shape) for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        found[f"midlayer.{name}.weight"] = ones(HIDDEN)
    found |= {"fc.weight": of(HIDDEN, 3 * HIDDEN), "norm.weight": ones(HIDDEN)}
    found["lm_head.weight"] = 4 * of(covered, HIDDEN)
    ids = torch.randperm(VOCAB, generator=generator)[:covered].sort().values
    found |= {"d2t": ids - torch.arange(covered), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    if embeddings:
        found["embed_tokens.weight"] = 3 * of(VOCAB, HIDDEN)
    if norms == 1:
        found["input_norm.weight"] = ones(3 * HIDDEN)
    elif norms:
        found |= {f"fc_norm.{i}.weight": ones(HIDDEN) for i in range(norms)}
    return found


def sglang(**changes: Any) -> tuple[dict, dict]:
    """As SpecForge and SGLang publish one: SGLang names the layer before."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": COVERED, **LAYER}
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    return {**config, "eagle_config": layers, **changes}, random_head()


def eagle() -> tuple[dict, dict]:
    """As SafeAILab's: no layers are named, and `d2t` need not ascend."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": COVERED, **LAYER}
    tensors = random_head()
    order = torch.randperm(COVERED, generator=torch.Generator().manual_seed(1))
    ids = (tensors["d2t"] + torch.arange(COVERED))[order]
    return {**config, "rope_theta": 500000.0}, tensors | {"d2t": ids - torch.arange(COVERED)}


def speculators(*, layer: dict | None = None, head: dict | None = None, **switches: Any) -> Any:
    """As speculators writes one: another name of the layer, settings in a part of their own."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "draft_vocab_size": COVERED,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b"}},
        "transformer_layer_config": LAYER | (layer or {}),
        **switches,
    }
    tensors = random_head(**(head or {}))
    return config, {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PUBLISHED: dict[str, Callable[[], tuple[dict, dict]]] = {
    "sglang": sglang,
    "eagle": eagle,
    "eagle, rope of Llama 3": lambda: sglang(rope_scaling={**LLAMA3}, rope_theta=10000.0),
    "speculators": lambda: speculators(norm_before_residual=True, head={"embeddings": True}),
    "speculators, residual as in EAGLE": lambda: speculators(
        layer={"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}}
    ),
    "speculators, norm before fc, yarn": lambda: speculators(
        norm_before_fc=True,
        norm_before_residual=True,
        head={"norms": 1, "embeddings": True},
        layer={"rope_parameters": {**YARN, "rope_theta": 10000.0}},
    ),
    "speculators, norms of each layer": lambda: speculators(
        fc_norm=True, norm_output=True, head={"norms": 3}
    ),
}


def write(folder: Path, config: dict, tensors: dict, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {
        name: one.to(dtype).contiguous() if one.is_floating_point() else one.contiguous()
        for name, one in tensors.items()
    }
    save_file(kept, folder / "model.safetensors")
    return folder


def read(folder: Path, module: Any) -> Eagle3Head:
    return read_published(folder, module.config, "d" * 64, ORIGIN)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


class Definition:
    """The published definition, read plainly: the whole text again for every token."""

    def __init__(self, config: dict, tensors: dict, module: Any):
        named = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items()}
        self.w = {name.removesuffix(".weight"): one for name, one in named.items()}
        self.config, self.module = config, module
        self.layer = config.get("transformer_layer_config", config)
        self.embeddings = self.w.get("embed_tokens", module.get_input_embeddings().weight)
        layers = config.get("eagle_aux_hidden_state_layer_ids")
        if layers is None and "eagle_config" in config:  # counted from the layer before
            layers = [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        self.layers = layers or [2, LAYERS // 2, LAYERS - 3]

    def rope(self, x: Tensor) -> Tensor:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

        names = (*LAYER, "rope_theta", "rope_scaling", "rope_parameters")
        shape = {name: self.layer[name] for name in names if name in self.layer}
        rotary = LlamaRotaryEmbedding(LlamaConfig(**shape))
        cos, sin = rotary(x, torch.arange(x.shape[1])[None])
        return x * cos[0] + rotate_half(x) * sin[0]

    def features(self, ids: list[int]) -> Tensor:
        found = self.module(torch.tensor([ids]), output_hidden_states=True).hidden_states
        parts = [found[i][0] for i in self.layers]
        if self.config.get("fc_norm"):
            parts = [rms(part, self.w[f"fc_norm.{i}"]) for i, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self.config.get("norm_before_fc"):
            joined = rms(joined, self.w["input_norm"])
        return joined @ self.w["fc"].T

    def run(self, hidden: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Of all pairs: what the next pair is fed, and logits of the head's tokens."""
        w, count = self.w, len(tokens)
        normed = rms(hidden, w["midlayer.hidden_norm"])
        residual = normed if self.config.get("norm_before_residual") else hidden
        embedded = rms(self.embeddings[tokens], w["midlayer.input_layernorm"])
        x = torch.cat([embedded, normed], -1)

        def split(name: str, heads: int) -> Tensor:
            product = x @ w[f"midlayer.self_attn.{name}_proj"].T
            return product.view(count, heads, HEAD_DIM).transpose(0, 1)

        query, key = self.rope(split("q", HEADS)), self.rope(split("k", KV_HEADS))
        key, value = (
            one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (key, split("v", KV_HEADS))
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = residual + attended.transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj"].T
        y = rms(x, w["midlayer.post_attention_layernorm"])
        gate = F.silu(y @ w["midlayer.mlp.gate_proj"].T) * (y @ w["midlayer.mlp.up_proj"].T)
        out = x + gate @ w["midlayer.mlp.down_proj"].T
        normed = rms(out, w["norm"])
        return normed if self.config.get("norm_output") else out, normed @ w["lm_head"].T

    @torch.no_grad()
    def draft(self, text: list[int], count: int) -> tuple[list[int], Tensor]:
        """Greedy draft tokens after a text, and the logits of the first."""
        attention = self.module.config._attn_implementation
        self.module.set_attn_implementation("eager")
        hidden, tokens = self.features(text[:-1]), text[1:]
        self.module.set_attn_implementation(attention)
        drafted, first = [], None
        for _ in range(count):
            fed, logits = self.run(hidden, tokens)
            first = logits[-1] if first is None else first
            column = int(logits[-1].argmax())
            drafted.append(column + int(self.w["d2t"][column]))
            hidden, tokens = torch.cat([hidden, fed[-1:]]), [*tokens, drafted[-1]]
        assert first is not None
        return drafted, first


@pytest.mark.parametrize("name", PUBLISHED)
def test_proposals_are_those_of_the_published_definition(name: str, tmp_path: Path) -> None:
    config, tensors = PUBLISHED[name]()
    module = llama(num_hidden_layers=LAYERS)
    head = read(write(tmp_path / "head", config, tensors), module)
    head.save(tmp_path / "artifact")
    target = over_slots(module)
    model = head_of(target, Eagle3Head.load(tmp_path / "artifact"))
    wanted, first = Definition(config, tensors, module).draft(list(TEXT), 5)
    slot, own = target.open(), model.open()
    target.forward([Forward("target", slot, TEXT[:-1], 1)])
    states = target.hidden_states(slot, 0, len(TEXT) - 1)
    (span,) = model.forward([Forward("head", own, TEXT[1:], 1, features=states)])
    ids = tensors["d2t"] + torch.arange(COVERED)
    torch.testing.assert_close(span.values[0], first[ids.argsort()], atol=2e-5, rtol=1e-4)
    assert span.whole.support is not None
    assert span.whole.support.tolist() == sorted(ids.tolist())
    drafted = [span.top[0]]
    while len(drafted) < len(wanted):
        fed = span.states
        assert fed is not None
        (span,) = model.forward([Forward("head", own, (drafted[-1],), 1, features=fed[-1:])])
        drafted.append(span.top[0])
    assert drafted == wanted
    assert len(set(drafted)) > 1


@pytest.mark.parametrize(
    "parameters", [{}, {"top_k": 3, "tree_tokens": 7}, {"num_speculative_tokens": 1}], ids=str
)
@pytest.mark.parametrize("name", ["sglang", "speculators"])
def test_output_over_a_published_head_is_the_targets(
    name: str, parameters: dict, tmp_path: Path
) -> None:
    config, tensors = PUBLISHED[name]()
    module = llama(num_hidden_layers=LAYERS)
    head = read(write(tmp_path / "head", config, tensors), module)
    strategy = build_strategy("eagle3", parameters, StrategyResources({"eagle3_head": head}))
    target = over_slots(module)
    job = Engine({"target": target}).generate(list(TEXT), Sampling(max_tokens=24), strategy)
    text = list(TEXT)
    for _ in range(24):
        text.append(int(plain_logits(module, text)[-1].argmax()))
    assert job.output == text[len(TEXT) :]
    assert job.session.stats.drafted > 0


def test_a_head_without_a_vocabulary_of_its_own_borrows_the_targets(tmp_path: Path) -> None:
    config, tensors = sglang(draft_vocab_size=None)
    bare = {name: one for name, one in tensors.items() if name not in ("d2t", "t2d", "lm_head")}
    del bare["lm_head.weight"]
    module = llama(num_hidden_layers=LAYERS)
    head = read(write(tmp_path / "head", config, bare), module)
    assert head.head_tokens.tolist() == list(range(VOCAB))
    own = {"lm_head.weight": module.lm_head.weight.detach(), "d2t": torch.zeros(VOCAB).long()}
    wanted, _ = Definition(config, {**tensors, **own}, module).draft(list(TEXT), 1)
    target = over_slots(module)
    model, slot = head_of(target, head), target.open()
    target.forward([Forward("target", slot, TEXT[:-1], 1)])
    states = target.hidden_states(slot, 0, len(TEXT) - 1)
    (span,) = model.forward([Forward("head", model.open(), TEXT[1:], 1, features=states)])
    assert span.top == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weights_stay_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    config, tensors = speculators()
    module = llama(num_hidden_layers=LAYERS)
    head = read(write(tmp_path / "head", config, tensors, dtype), module)
    head.save(tmp_path / "kept")
    kept = Eagle3Head.load(tmp_path / "kept")
    kept.write_standalone(tmp_path / "out", torch.zeros(COVERED, HIDDEN))
    again = read(tmp_path / "out", module)
    for one in (kept, again):
        assert one.layers == (1, 4, 6)
        assert one.state.keys() == head.state.keys()
        for name, tensor in head.state.items():
            assert tensor.dtype == dtype
            assert torch.equal(one.state[name], tensor)


def without(name: str) -> dict:
    return {key: one for key, one in random_head().items() if key != name}


def with_tensors(**changed: Tensor) -> tuple[dict, dict]:
    """A head with other weights, by the names of their modules."""
    other = {f"{name.replace('__', '.')}.weight": one for name, one in changed.items()}
    return sglang()[0], random_head() | other


def reading(layers: Any) -> tuple[dict, dict]:
    found: tuple[dict, dict] = speculators(eagle_aux_hidden_state_layer_ids=layers)
    return found


BIASED = {"midlayer.self_attn.q_proj.bias": torch.zeros(32)}
UNKNOWN = ("unsupported_head", "made for this target")
REFUSED: dict[str, tuple[tuple[dict, dict], tuple[str, ...]]] = {
    "biases": ((sglang()[0], random_head() | BIASED), (*UNKNOWN, "q_proj.bias")),
    "two layers": (sglang(num_hidden_layers=2), (*UNKNOWN, "layers")),
    "a tensor too few": (
        (sglang()[0], without("midlayer.hidden_norm.weight")),
        (*UNKNOWN, "hidden_norm"),
    ),
    "another width": (with_tensors(fc=torch.zeros(HIDDEN, 99)), (*UNKNOWN, "99", "96")),
    "one dimension": (with_tensors(fc=torch.zeros(HIDDEN)), (*UNKNOWN, "fc.weight")),
    "a number": (with_tensors(norm=torch.tensor(1.0)), (*UNKNOWN, "norm.weight")),
    "whole numbers": (with_tensors(fc=torch.zeros(HIDDEN, 96).char()), (*UNKNOWN, "int8")),
    "tokens of another target": (
        (sglang()[0], random_head() | {"d2t": torch.full((COVERED,), 30)}),
        (*UNKNOWN, "61"),
    ),
    "a token twice": (
        (sglang()[0], random_head() | {"d2t": -torch.arange(COVERED)}),
        (*UNKNOWN, "twice"),
    ),
    "no list of offsets": ((sglang()[0], random_head() | {"d2t": torch.zeros(2)}), UNKNOWN),
    "fewer output rows than tokens": (
        with_tensors(lm_head=torch.zeros(COVERED - 1, HIDDEN)),
        (*UNKNOWN, "lm_head", "39", "40"),
    ),
    "more output rows than tokens": (
        with_tensors(lm_head=torch.zeros(COVERED + 1, HIDDEN)),
        (*UNKNOWN, "lm_head", "41"),
    ),
    "embeddings of fewer ids than the target's": (
        with_tensors(embed_tokens=torch.zeros(VOCAB - 3, HIDDEN)),
        (*UNKNOWN, "embed_tokens", "58", "61"),
    ),
    "embeddings of another width": (
        with_tensors(embed_tokens=torch.zeros(VOCAB, HIDDEN + 8)),
        (*UNKNOWN, "embed_tokens"),
    ),
    "heads that do not fit the matrices": (sglang(num_attention_heads=8), (*UNKNOWN, "o_proj")),
    "a norm that is not there": (speculators(norm_before_fc=True), (*UNKNOWN, "input_norm")),
    "a norm too few": (speculators(fc_norm=True, head={"norms": 2}), (*UNKNOWN, "fc_norm.2")),
    "layers beyond the target": (reading([2, 4, 41]), (*UNKNOWN, "41", "8")),
    "no layers": (reading("abc"), ("no_head",)),
    "no named layers": (sglang(eagle_config=[1]), ("no_head",)),
    "no size": (sglang(hidden_size="32"), ("no_head",)),
    "no vocabulary": (sglang(vocab_size=None), ("no_head",)),
    "no rope": (sglang(rope_scaling="yarn"), ("no_head",)),
    "a rope without its factor": (sglang(rope_scaling={"rope_type": "yarn"}), ("no_head",)),
    "rope that depends on the text": (
        sglang(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        ("unsupported_architecture", "dynamic", "choose another head"),
    ),
    "another activation": (sglang(hidden_act="gelu"), ("unsupported_architecture", "gelu")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_by_name(case: str, tmp_path: Path) -> None:
    (config, tensors), (code, *names) = REFUSED[case]
    write(tmp_path / "head", config, tensors)
    with raises_code(code, *names):
        read(tmp_path / "head", llama(num_hidden_layers=LAYERS))


def test_a_target_that_keeps_no_states_has_no_head(tmp_path: Path) -> None:
    from transformers import AutoConfig

    sizes = {name: LAYER[name] for name in ("hidden_size", "vocab_size", "head_dim")}
    for kind in ("gpt_oss", "deepseek_v3", "llama4_text"):
        target = AutoConfig.for_model(kind, **sizes, num_hidden_layers=LAYERS)
        with raises_code("unsupported_head", kind):
            read_published(write(tmp_path, *sglang()), target, "d" * 64, ORIGIN)


def test_embeddings_may_have_more_rows_than_the_target(tmp_path: Path) -> None:
    config, tensors = with_tensors(embed_tokens=torch.ones(VOCAB + 3, HIDDEN))
    head = read(write(tmp_path, config, tensors), llama(num_hidden_layers=LAYERS))
    assert len(head.state["embed_tokens.weight"]) == VOCAB + 3


def test_pickled_weights_and_other_folders_are_refused(tmp_path: Path) -> None:
    module = llama(num_hidden_layers=LAYERS)
    config, _ = sglang()
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with raises_code("no_weights", "pytorch_model.bin", str(tmp_path)):
        read(tmp_path, module)
    for body in ("", "{", "[]", '{"model_type": "llama"}'):
        (tmp_path / "config.json").write_text(body)
        with raises_code("no_head", str(tmp_path)):
            read(tmp_path, module)
    with raises_code("no_head"):
        read(tmp_path / "nowhere", module)
