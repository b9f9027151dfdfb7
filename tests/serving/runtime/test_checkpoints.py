"""Model folders as they are published: each is decoded as transformers decodes it, or refused by
one line, as far as can be before weights are read. None is taken for something else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from draftwell.serving.artifacts import checkpoint as checkpoints
from draftwell.serving.artifacts.checkpoint import computed_bytes
from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.runtime import model_files, pair as pairs
from draftwell.serving.runtime.model_files import load_module, read_config
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import LoadSettings, load_pair, over_slots
from tests.support.errors import raises_code
from tests.support.models.checkpoints import (
    PROMPT,
    VOCAB,
    WEIGHTS,
    Change,
    Tensors,
    both,
    checkpoint,
    edit,
    greedy,
    ours,
    rewrite,
)
from tests.support.models.llama_shapes import llama

UP = "model.layers.1.mlp.up_proj.weight"
CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """A folder of one's own, which is right."""
    return shutil.copytree(plain, tmp_path / "model")


def quantised(**settings: Any) -> Change:
    return lambda folder: edit(folder / CONFIG, quantization_config=settings)


def configured(**changes: Any) -> Change:
    return lambda folder: edit(folder / CONFIG, **changes)


def removed(*names: str) -> Change:
    return both(*((lambda folder, name=name: (folder / name).unlink()) for name in names))


def written(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def tensors(change: Callable[[Tensors], Any]) -> Change:
    """A change of the weights; one that returns None is made in place."""
    return lambda folder: rewrite(folder, lambda found: change(found) or found)


def without(name: str) -> Change:
    return lambda folder: rewrite(
        folder, lambda found: {key: one for key, one in found.items() if key != name}
    )


def last_shard(folder: Path, text: str | None) -> None:
    """Take the last of several files of weights out, or put something else in its place."""
    sharded(folder)
    file = max(folder.glob("model-*.safetensors"))
    file.unlink()
    if text is not None:
        file.write_text(text)


def sharded(folder: Path) -> None:
    module: Any = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module.save_pretrained(folder, max_shard_size="100KB")
    (folder / WEIGHTS).unlink()


def cut(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-5000])


def pickled(folder: Path) -> None:
    torch.save({"weight": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def adapter(folder: Path) -> None:
    edit(folder / "adapter_config.json", base_model_name_or_path="some/model", peft_type="LORA")
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")


def own_layout(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
    (folder / CONFIG).rename(folder / "params.json")


def original(folder: Path) -> None:
    (folder / "original").mkdir()
    (folder / WEIGHTS).rename(folder / "original" / "consolidated.00.pth")
    (folder / CONFIG).unlink()


def own_code(folder: Path) -> None:
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit(folder / CONFIG, auto_map=names, model_type="own")
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


def fp8(block: list[int] | None) -> Change:
    """Projections in FP8 with a scale for each block, or for the matrix, as DeepSeek and Qwen
    publish them."""

    def packed(found: Tensors) -> Tensors:
        stored: Tensors = {}
        for name, weight in found.items():
            if not name.endswith("proj.weight"):
                stored[name] = weight
                continue
            high, wide = block or weight.shape
            rows, columns = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
            filled = torch.zeros(rows * high, columns * wide)
            filled[: weight.shape[0], : weight.shape[1]] = weight
            blocks = filled.view(rows, high, columns, wide)
            scales = blocks.abs().amax((1, 3)).clamp(min=1e-8) / 448
            whole = (blocks / scales[:, None, :, None]).view_as(filled)
            kept = whole[: weight.shape[0], : weight.shape[1]]
            stored[name] = kept.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales if block else scales.view(())
        return stored

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    return both(tensors(packed), quantised(**settings))


def whole_numbers(found: Tensors) -> None:
    found[UP] = (found[UP] * 10).to(torch.int32)


def another_layer(found: Tensors) -> None:
    found[UP.replace("1", "2")] = found[UP].clone()


def a_bias(found: Tensors) -> None:
    found["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)


def as_kind(kind: str) -> Change:
    """Another type's configuration, with all that it takes unless told otherwise."""
    return lambda folder: (folder / CONFIG).write_text(
        tf.AutoConfig.for_model(kind).to_json_string()
    )


NOT_DECODED = "unsupported_quantisation"
EARLY: dict[str, tuple[Change, str, tuple[str, ...]]] = {
    "gptq of 3 bits": (
        quantised(quant_method="gptq", bits=3),
        NOT_DECODED,
        ("gptq of 3 bits", "2 or 4 or 8 bits", "full ones"),
    ),
    "gptq for one kernel": (
        quantised(quant_method="gptq", bits=4, checkpoint_format="marlin"),
        NOT_DECODED,
        ("layout marlin", "gptq or gptq_v2"),
    ),
    "awq for one kernel": (
        quantised(quant_method="awq", bits=4, version="GEMV"),
        NOT_DECODED,
        ("layout gemv", "4 bits in gemm"),
    ),
    "bitsandbytes in 8 bits": (quantised(load_in_8bit=True), NOT_DECODED, ("8 bits",)),
    **{
        name: (quantised(quant_method=name), NOT_DECODED, (name, "full weights"))
        for name in ("torchao", "quanto", "hqq", "eetq", "fbgemm_fp8", "bitnet", "aqlm", "higgs")
    },
    # transformers warns of a method that it does not know, and reads what is packed as it is
    **{
        name: (quantised(quant_method=name), NOT_DECODED, (name,))
        for name in ("modelopt", "exl2", "marlin", "gguf")
    },
    "no method": (quantised(bits=4), NOT_DECODED, ("quant_method",)),
    "settings that are no object": (configured(quantization_config="gptq"), NOT_DECODED, ()),
    "in the text part": (
        configured(text_config={"quantization_config": {"quant_method": "exl2"}}),
        NOT_DECODED,
        ("exl2",),
    ),
    "packed, and nothing says how": (tensors(whole_numbers), NOT_DECODED, (UP, "I32")),
    "FP8 of which nothing says the scales": (
        both(fp8([32, 32]), configured(quantization_config=...)),
        NOT_DECODED,
        ("F8_E4M3",),
    ),
    "FP8 blocks that are not full": (fp8([64, 64]), NOT_DECODED, ("down_proj", "[64, 64]")),
    "cut off": (cut, "unreadable_model", (WEIGHTS, "cut off")),
    "a pointer of Git LFS": (
        written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"),
        "unreadable_model",
        (WEIGHTS,),
    ),
    "a shard is missing": (
        lambda folder: last_shard(folder, None),
        "no_weights",
        ("model-0000", INDEX),
    ),
    "a shard is cut off": (
        lambda folder: last_shard(folder, "12345678"),
        "unreadable_model",
        ("model-0000", "cut off"),
    ),
    "shards without their index": (both(sharded, removed(INDEX)), "no_weights", (INDEX,)),
    "an index that is cut off": (
        both(sharded, written(INDEX, "{")),
        "unreadable_model",
        (INDEX,),
    ),
    "an index of nothing": (both(sharded, written(INDEX, "{}")), "unreadable_model", (INDEX,)),
    "pickled weights alone": (pickled, "no_weights", ("never read", "save_pretrained")),
    "no weights": (removed(WEIGHTS), "no_weights", ("save_pretrained",)),
    "an adapter alone": (both(removed(WEIGHTS, CONFIG), adapter), "adapter", ("merge_and_unload",)),
    "an adapter beside its model": (adapter, "adapter", ("merge_and_unload",)),
    "Mistral's layout": (own_layout, "no_model", ("publisher's own layout",)),
    "Meta's layout": (original, "no_model", ("publisher's own layout",)),
    "Mistral's weights": (
        lambda folder: (folder / WEIGHTS).rename(folder / "consolidated.safetensors"),
        "no_weights",
        ("consolidated", WEIGHTS),
    ),
    "code of its own": (own_code, "remote_code", ("auto_map",)),
    "a type that transformers does not know": (
        configured(model_type="brandnew4"),
        "unknown_model",
        ("brandnew4", tf.__version__, "pip install -U transformers"),
    ),
    "weights under a name of its own": (
        configured(transformers_weights="other.safetensors"),
        "no_weights",
        ("transformers_weights", "other.safetensors", WEIGHTS),
    ),
    **{
        kind: (as_kind(kind), "unsupported_architecture", (kind, "models.md"))
        for kind in ("t5", "bert", "roberta", "bart", "vit", "whisper", "paligemma")
    },
    "no type": (configured(model_type=...), "unknown_model", ()),
    "a dtype that torch does not know": (configured(dtype="fp4"), "unreadable_model", ("fp4",)),
    "a count in words": (
        configured(num_hidden_layers="2"),
        "unreadable_model",
        ("num_hidden_layers",),
    ),
    "a config that is cut off": (written(CONFIG, "{,"), "unreadable_model", (CONFIG,)),
    "a config that is a list": (written(CONFIG, "[]"), "unreadable_model", (CONFIG,)),
    # transformers leaves a damaged one out, and its end tokens with it
    "a generation config that is cut off": (
        written(GENERATION, "{"),
        "unreadable_model",
        (GENERATION,),
    ),
    "an end token in words": (
        written(GENERATION, json.dumps({"eos_token_id": "</s>"})),
        "unreadable_model",
        (GENERATION, "</s>"),
    ),
}
LATE: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a tensor is missing": (without(UP), ("lacks", UP)),
    "no head, and not tied": (
        without("lm_head.weight"),
        ("lm_head",),
    ),
    "a layer too many": (tensors(another_layer), ("layers.2",)),
    "a bias that the config does not have": (tensors(a_bias), ("q_proj.bias",)),
    "other sizes": (configured(intermediate_size=128), ("shape", "mlp", "more tensors")),
}


def load(folder: Path, draft: Path | None = None) -> Any:
    return load_pair(PairFiles("tiny", folder, draft), LoadSettings(dtype="float32"))


@pytest.mark.parametrize("name", EARLY)
def test_it_is_refused_by_one_line_before_any_weights_are_read(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, code, names = EARLY[name]
    change(folder)
    monkeypatch.setattr(pairs, "load_module", lambda *_: pytest.fail("weights were read"))
    with raises_code(code, *names) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "ran").exists()


def test_a_drafts_files_are_looked_at_before_the_targets_weights_are_read(
    folder: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised(quant_method="exl2")(folder)
    monkeypatch.setattr(pairs, "load_module", lambda *_: pytest.fail("weights were read"))
    with raises_code(NOT_DECODED, str(folder), "exl2"):
        load(plain, folder)


@pytest.mark.parametrize("method", ["compressed-tensors", "bitsandbytes"])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen2_5_vl"])
def test_packed_weights_of_a_model_of_images_are_refused_before_they_are_read(
    folder: Path, kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_installed", lambda package: True)
    both(as_kind(kind), quantised(quant_method=method))(folder)
    with raises_code(NOT_DECODED, kind, method):
        read_config(folder)


@pytest.mark.parametrize("name", LATE)
def test_tensors_that_are_not_those_of_the_config_are_named(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, names = LATE[name]
    change(folder)
    caplog.clear()
    with raises_code("weights_do_not_fit", *names) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert not [one for one in caplog.messages if "LOAD REPORT" in one]


def beside(found: Tensors) -> None:
    """What older checkpoints, and those of models with further parts, have besides."""
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    found["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)
    found["model.vision_tower.layers.0.weight"] = torch.ones(2, 2)
    found["mtp.layers.0.weight"] = torch.ones(2, 2)


def guessing_layer(folder: Path) -> None:
    """DeepSeek's layer behind the others, which drafts."""
    edit(folder / CONFIG, num_nextn_predict_layers=1)
    tensors(another_layer)(folder)


def other_head(found: Tensors) -> None:
    found["lm_head.weight"] = found["model.embed_tokens.weight"].flip(0)


TIED = configured(tie_word_embeddings=True)
EXACT: dict[str, Change] = {
    "one file": lambda folder: None,
    "several files": sharded,
    "one file and a stale index": written(INDEX, "{"),
    "weights of the publisher's layout besides": lambda folder: shutil.copy(
        folder / WEIGHTS, folder / "consolidated.safetensors"
    ),
    "no generation config": removed(GENERATION),
    "torch_dtype": configured(torch_dtype="bfloat16", dtype=...),
    "code of its own for a known type": configured(
        auto_map={"AutoModelForCausalLM": "modeling_own.Model"}
    ),
    "tied, without a head": both(TIED, without("lm_head.weight")),
    "tied, with the same head": both(
        TIED, tensors(lambda found: found | {"lm_head.weight": found["model.embed_tokens.weight"]})
    ),
    "tied, with another head": both(TIED, tensors(other_head)),
    "parts that text does without": tensors(beside),
    "a layer that drafts": guessing_layer,
    "FP8 in blocks": fp8([32, 32]),
    "FP8 in blocks larger than a matrix": fp8([128, 128]),
    "FP8 with a scale for a matrix": fp8(None),
}


@pytest.mark.parametrize("name", EXACT)
def test_it_is_decoded_as_transformers_decodes_it(folder: Path, name: str) -> None:
    EXACT[name](folder)
    want = greedy(folder)
    assert len(set(want)) >= 10
    assert ours(folder) == {"plain": want, "vanilla_sd": want}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ([1, 9], None, {1, 9}),
        (1, [1, 9], {1, 9}),
        ([1, 8], [9], {1, 9}),  # as transformers: the generation config counts
        ([1, 8], 9, {1, 9}),
        (None, None, {1}),
    ],
)
def test_end_tokens_are_those_of_transformers_and_the_tokenizers(
    folder: Path, config: Any, generation: Any, expected: set[int]
) -> None:
    edit(folder / CONFIG, eos_token_id=config)
    (folder / GENERATION).unlink()
    if generation is not None:
        edit(folder / GENERATION, eos_token_id=generation)
    assert load(folder).stop_tokens == expected


def test_a_second_end_token_ends_a_text(folder: Path) -> None:
    third = greedy(folder)[2]
    edit(folder / CONFIG, eos_token_id=[1, third])
    (folder / GENERATION).unlink()
    want = greedy(folder)
    assert want[-1] == third
    assert len(want) <= 3
    assert ours(folder) == {"plain": want, "vanilla_sd": want}


def test_rows_of_a_padded_vocabulary_are_ids_as_in_transformers(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "padded", vocab_size=VOCAB + 29)
    rewrite(folder, lambda found: found | {"lm_head.weight": found["lm_head.weight"].flip(0)})
    want = greedy(folder)
    assert max(want) >= VOCAB
    assert ours(folder) == {"plain": want, "vanilla_sd": want}


def test_mxfp4_becomes_full_weights(tmp_path: Path) -> None:
    """gpt-oss, whose experts alone are packed."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    config = tf.GptOssConfig(
        **sizes,
        vocab_size=VOCAB,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    folder = checkpoint(tmp_path / "experts", config)

    def packed(found: Tensors) -> Tensors:
        stored: Tensors = {}
        for name, weight in found.items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                stored[name] = weight
                continue
            experts, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        return stored

    rewrite(folder, packed)
    quantised(quant_method="mxfp4")(folder)
    module = load_module(folder, torch.float32, "cpu")
    want: Any = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        assert torch.equal(module(ids).logits, want(ids).logits)
    assert "quantization_config" not in module.config.to_dict()
    assert getattr(module, "hf_quantizer", None) is None


def in_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers [..., n] as int32 words, the first of each word in its lowest bits."""
    parts = numbers.long().unflatten(-1, (-1, 32 // bits))
    words = sum(parts[..., place] << bits * place for place in range(32 // bits))
    return torch.as_tensor(words).to(torch.int32)


def of_integers(found: Tensors, settings: dict[str, Any], groups: torch.Tensor) -> Tensors:
    """Tensors of GPTQ or AWQ with random whole numbers, as their papers' code stores them; the
    full weights that they mean take their place in `found`."""
    torch.manual_seed(1)
    bits, awq = settings["bits"], settings["quant_method"] == "awq"
    stored: Tensors = {}
    for name, weight in found.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("proj") or layer.startswith("vision_tower"):
            stored[name] = weight
            continue
        (outputs, inputs), group = weight.shape, groups[: weight.shape[1]]
        whole = torch.randint(0, 2**bits, (inputs, outputs))
        zeros = torch.randint(0, 2**bits, (int(group.max()) + 1, outputs))
        scales = (torch.rand(zeros.shape) + 0.5).half() / 2**bits
        found[name] = ((whole - zeros[group]) * scales.float()[group]).T
        if awq:  # in each word the even columns, then the odd ones
            whole, zeros = (
                one.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
                for one in (whole, zeros)
            )
            stored[f"{layer}.qweight"] = in_words(whole, bits)
        else:
            stored[f"{layer}.qweight"] = in_words(whole.T, bits).T
            stored[f"{layer}.g_idx"] = group.to(torch.int32)
            if settings.get("checkpoint_format") != "gptq_v2":
                zeros = zeros - 1 & 2**bits - 1
        stored |= {f"{layer}.qzeros": in_words(zeros, bits), f"{layer}.scales": scales}
    return stored


def of_images(folder: Path) -> Path:
    """A Gemma 3, with a tower that decoding text does without."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text = sizes | {
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    config = tf.Gemma3Config(
        text_config=text,
        vision_config=tower,
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    return checkpoint(folder, config)


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize(
    ("settings", "in_order", "images"),
    [
        (GPTQ, True, False),
        (GPTQ | {"desc_act": True}, False, False),
        (GPTQ | {"bits": 2}, True, False),
        (GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, True, False),
        (GPTQ, True, True),
        (AWQ, True, False),
    ],
)
def test_packed_integers_become_the_full_weights_that_they_mean(
    folder: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    in_order: bool,
    images: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three words of 4 bits at a time, and what is left of a row after them."""
    monkeypatch.setattr(model_files, "UNPACKED_BYTES", 3 * 8 * 64 * model_files.BYTES_A_NUMBER)
    folder = of_images(tmp_path / "images") if images else folder
    whole = shutil.copytree(folder, tmp_path / "whole")
    groups = torch.arange(96) // 32
    groups = groups if in_order else groups[torch.randperm(96)]
    found = load_file(folder / WEIGHTS)
    stored = of_integers(found, settings, groups)
    rewrite(folder, lambda _: stored)
    rewrite(whole, lambda _: found)
    quantised(**settings, group_size=32)(folder)
    for each in (folder, whole):
        edit(each / GENERATION, eos_token_id=[1, 2])
    want = greedy(whole)
    assert len(set(want)) >= 10
    assert ours(folder) == {"plain": want, "vanilla_sd": want}
    assert load(folder).stop_tokens == {1, 2}
    assert 0 <= computed_bytes(folder, 4) - computed_bytes(whole, 4) < 50_000


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        given = func(*args, **kwargs or {})
        if isinstance(given, torch.Tensor):
            self.found = max(self.found, given.nbytes)
        return given


@pytest.mark.parametrize("settings", [GPTQ, AWQ])
def test_unpacking_takes_little_memory_beside_the_result(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "UNPACKED_BYTES", 200_000)
    weights = {"proj.weight": torch.empty(256, 512)}
    stored = of_integers(weights, settings, torch.arange(512) // 32)
    parts = {"g_idx": None} | {name.removeprefix("proj."): one for name, one in stored.items()}
    with Largest() as largest:
        full = model_files.full_weight(parts, settings, torch.bfloat16)
    assert torch.equal(full, weights["proj.weight"].bfloat16())
    assert largest.found == full.nbytes == 2 * 256 * 512


def test_layers_of_a_package_are_never_read_as_full_weights() -> None:
    module = llama()
    assert type(over_slots(module)) is LeanLlama
    module.hf_quantizer = object()  # as transformers leaves it on a model that stays packed
    assert type(over_slots(module)) is TransformersModel


def in_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in whole numbers of 4 bits, with a scale for 32 inputs of an output."""
    groups = weight.view(len(weight), -1, 32)
    scales = groups.abs().amax(2) / 7
    whole = (groups / scales[..., None]).round().clamp(-8, 7).to(torch.int8).view_as(weight)
    return whole, scales


def compressed(folder: Path, *, activations: bool) -> None:
    """A checkpoint of compressed-tensors: 8 bits, activations too, or weights of 4 bits."""
    found: Tensors = {}

    def packed(tensors: Tensors) -> Tensors:
        for name, weight in tensors.items():
            base = name.removesuffix("weight")
            if not name.endswith("proj.weight"):
                found[name] = weight
            elif activations:
                scale = weight.abs().amax(1, keepdim=True) / 127
                found[name] = (weight / scale).round().to(torch.int8)
                found[f"{name}_scale"] = scale
            else:
                from compressed_tensors.compressors.pack_quantized.base import pack_to_int32

                whole, scales = in_groups(weight)
                found[f"{base}weight_packed"] = pack_to_int32(whole, 4)
                found[f"{base}weight_scale"] = scales
                found[f"{base}weight_shape"] = torch.tensor(weight.shape)
        return found

    rewrite(folder, packed)
    kind: dict[str, Any] = {"type": "int", "symmetric": True}
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": kind | weights}
    if activations:
        eight = kind | {"num_bits": 8}
        group["weights"] = eight | {"strategy": "channel"}
        group["input_activations"] = eight | {"strategy": "token", "dynamic": True}
    quantised(
        quant_method="compressed-tensors",
        format="int-quantized" if activations else "pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
        config_groups={"group_0": group},
    )(folder)


@pytest.mark.parametrize("activations", [False, True])
def test_compressed_tensors_are_decoded_by_the_layers_of_their_package(
    folder: Path, activations: bool
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    compressed(folder, activations=activations)
    want = greedy(folder)
    assert ours(folder) == {"plain": want, "vanilla_sd": want}


def test_bitsandbytes_in_4_bits_are_decoded_by_the_layers_of_their_package(
    tmp_path: Path,
) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    whole = checkpoint(tmp_path / "whole", hidden_size=128, intermediate_size=128)
    module: Any = tf.AutoModelForCausalLM.from_pretrained(
        whole, quantization_config=tf.BitsAndBytesConfig(load_in_4bit=True), dtype=torch.float32
    )
    module.save_pretrained(tmp_path / "packed")
    for file in whole.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "packed")
    want = greedy(tmp_path / "packed")
    assert ours(tmp_path / "packed") == {"plain": want, "vanilla_sd": want}
