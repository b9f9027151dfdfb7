"""GGUF files: made into the model that transformers reads from them, whatever its architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftwell.registry.pairs import PairSpec, fetch, fetching
from draftwell.serving.artifacts import pair_files
from tests.support.errors import raises_code
from tests.support.models.checkpoints import BYTES, PROMPT, SPECIAL

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
WORDS = [*SPECIAL, *BYTES, "ab"]


def write_gguf(file: Path, kind: str, *, without: str = "") -> Path:
    """A model of random weights in Q8_0, without the tensors whose name has `without`."""
    draws = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(file), kind)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_scores([0.0] * len(WORDS))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def add(name: str, *shape: int) -> None:
        weight = (draws.normal(size=shape) * 0.3).astype(np.float32)
        if without and without in name:
            return
        if len(shape) == 1:
            writer.add_tensor(name, weight + 1)
        else:
            packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    keys = KV_HEADS * HIDDEN // HEADS
    add("token_embd.weight", len(WORDS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    add("output.weight", len(WORDS), HIDDEN)
    for layer in (f"blk.{number}." for number in range(LAYERS)):
        add(f"{layer}attn_norm.weight", HIDDEN)
        add(f"{layer}ffn_norm.weight", HIDDEN)
        for name, rows in (("q", HIDDEN), ("k", keys), ("v", keys)):
            add(f"{layer}attn_{name}.weight", rows, HIDDEN)
            if kind == "qwen2":
                add(f"{layer}attn_{name}.bias", rows)
        add(f"{layer}attn_output.weight", HIDDEN, HIDDEN)
        add(f"{layer}ffn_gate.weight", INNER, HIDDEN)
        add(f"{layer}ffn_up.weight", INNER, HIDDEN)
        add(f"{layer}ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def fetched(path: Path, said: list[str] | None = None) -> Path:
    """The folder of a pair whose target is at a path."""
    row = {"name": "tiny", "description": "d", "licence": "l", "target": {"path": str(path)}}
    return fetch(
        PairSpec.model_validate(row), progress=(said if said is not None else []).append
    ).target


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTWELL_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_gguf_file_is_the_model_that_transformers_reads_from_it(
    tmp_path: Path, kind: str
) -> None:
    said: list[str] = []
    file = write_gguf(tmp_path / "model.gguf", kind)
    folder = fetched(file, said)
    assert fetched(tmp_path) == folder, "the only file of a folder"
    assert len(said) == 1, "converted once"
    assert "model.gguf" in said[0]
    want: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    made: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert made.config.model_type == kind
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        assert torch.equal(made(ids).logits, want(ids).logits)
    known: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("abc cab")["input_ids"] == known("abc cab")["input_ids"]


def test_a_gguf_file_is_hashed_once_as_long_as_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "model.gguf", "llama")
    folder = fetched(file)
    pair_files._sha256_once.cache_clear()  # as in another process
    with monkeypatch.context() as patch:
        for module in (pair_files, fetching):
            patch.setattr(module, "sha256_file", lambda _: pytest.fail("it was read again"))
        assert fetched(file) == folder
    write_gguf(file, "qwen2")
    assert fetched(file) != folder


def test_what_cannot_be_converted_is_refused_by_one_line_and_leaves_nothing(
    tmp_path: Path, models: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(b"GGUFxx")
    unknown = write_gguf(tmp_path / "unknown.gguf", "nonsense")
    lacking = write_gguf(tmp_path / "lacking.gguf", "llama", without="blk.1.ffn_up")
    for file, code, named in (
        (cut, "unreadable_model", "cut.gguf"),
        (unknown, "unreadable_model", "nonsense"),
        (lacking, "weights_do_not_fit", "model.layers.1.mlp.up_proj.weight"),
    ):
        with raises_code(code, str(file), named) as caught:
            fetched(file)
        assert "\n" not in str(caught.value)
    assert not models.exists() or not list(models.iterdir())


def test_one_of_several_gguf_files_has_to_be_named(tmp_path: Path) -> None:
    for name in ("model-Q4_0.gguf", "model-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with raises_code("no_model", "2 GGUF files", "model-Q4_0.gguf"):
        fetched(tmp_path)
