"""Which peers can be measured, what they are given to read, and what the report says about them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.peers import check_peers
from draftwell.components.bench.peers.gguf_file import renamed, write_gguf
from draftwell.components.bench.peers.loading import open_peers, variants_of
from draftwell.components.bench.peers.model_files import gguf_of, made_once, model_folder
from draftwell.components.bench.peers.transformers_peer import own_attention, transformers_peers
from draftwell.components.bench.report.tables import bench_markdown, entries_of
from draftwell.components.bench.schema import BenchReport
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.distil.eagle3.network import Eagle3Network, head_config
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.runtime.pair import LoadedPair, over_slots
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.errors import raises_code
from tests.support.models.llama_shapes import llama as wide_llama
from tests.support.models.resources import ORIGIN
from tests.support.models.tiny import llama, llama_pair
from tests.support.models.unbatched_families import module_of
from tests.support.peers.environments import install

PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abcab cabinet", "hello hello"])]


def test_a_draft_of_fewer_ids_does_not_assist_transformers() -> None:
    """`generate` raises an error there."""
    target, draft = wide_llama(vocab_size=64), wide_llama(vocab_size=61)
    models = {"target": over_slots(target), "draft": over_slots(draft)}
    pair: Any = SimpleNamespace(modules={"target": target, "draft": draft}, models=models)
    group = transformers_peers(pair, 2)
    assert [one.label for one in group.contenders] == [
        "transformers/autoregressive",
        "transformers/prompt_lookup",
    ]
    assert any("64" in note and "61" in note for note in group.notes)
    pair.modules["draft"] = wide_llama(vocab_size=64)
    assert "transformers/assisted" in [one.label for one in transformers_peers(pair, 2).contenders]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of peers, both of them fakes."""
    return install(tmp_path / "peers", monkeypatch)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedPair:
    """A tiny pair whose modules say that they were loaded from a folder."""
    loaded = llama_pair(slots=1)
    for role, module in loaded.modules.items():
        folder = tmp_path / role
        module.save_pretrained(folder)
        monkeypatch.setattr(module, "name_or_path", str(folder))
    return loaded


def test_a_peer_that_is_not_installed_names_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWELL_PEERS", str(tmp_path))
    with raises_code("peer_not_installed", "vllm", "make peers"):
        check_peers(["transformers", "vllm"])
    (tmp_path / "vllm" / "bin").mkdir(parents=True)  # an installation that was stopped
    with raises_code("peer_not_installed", "vllm", "make peers"):
        check_peers(["vllm"])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": "cuda"}, "--device cpu"),
        ({"padded": True}, "pad_target"),
    ],
)
def test_a_bench_that_they_could_not_repeat_is_refused(
    root: Path, settings: dict[str, object], named: str
) -> None:
    check_peers(["transformers"], **settings)  # type: ignore[arg-type]
    with raises_code("peer_settings", "vllm", named):
        check_peers(["transformers", "vllm"], **settings)  # type: ignore[arg-type]


def test_the_report_has_a_row_for_each_variant_with_version_and_interval(
    root: Path, pair: LoadedPair
) -> None:
    report = run_bench(
        pair,
        [StrategyChoice("prompt_lookup")],
        PROMPTS,
        StrategyResources(),
        BenchSettings(max_tokens=6, peers=("transformers", "vllm", "llama.cpp"), threads=1),
        cost_ratios=False,
    )
    labels = [label for label, _ in entries_of(report)]
    assert [label for label in labels if "fake" in label] == [
        "vllm (fake 1.0): autoregressive",
        "vllm (fake 1.0): ngram",
        "vllm (fake 1.0): draft_model",
        "llama.cpp (fake 1.0): autoregressive",
        "llama.cpp (fake 1.0): prompt_lookup",
    ]
    for entry in (
        *report.peers["vllm"].values(),
        *report.peers["llama.cpp"].values(),
    ):
        assert entry.tokens_per_second
        assert entry.speedup_low <= entry.speedup <= entry.speedup_high  # type: ignore[operator]
    assert {"autoregressive / vllm, plain", "best lossless / fastest of llama.cpp"} <= {
        row.name for row in report.headlines
    }
    assert "fake: 1 threads, OMP_NUM_THREADS=1" in bench_markdown(report)
    assert BenchReport.model_validate(report.to_json()) == BenchReport.model_validate(
        BenchReport.model_validate(report.to_json()).to_json()
    )
    assert report.to_json()["peer_versions"]["vllm"] == "fake 1.0"


def test_vllm_gets_the_pairs_head_with_what_it_borrows(root: Path, pair: LoadedPair) -> None:
    module = pair.modules["target"]
    network = Eagle3Network(head_config(module.config, 3, (0, 1, 1)))
    head = Eagle3Head(
        dict(network.state_dict()),
        network.config,
        torch.tensor([1, 2, 5]),
        (0, 1, 1),
        "d" * 64,
        ORIGIN,
    )
    found = variants_of("vllm", pair, 2, head)["eagle3"]
    assert found is not None
    assert load_file(Path(found["model"]) / "model.safetensors")["lm_head.weight"].shape == (
        3,
        module.config.hidden_size,
    )
    assert "eagle3" not in variants_of("vllm", pair, 2)


def test_peers_end_with_the_bench(root: Path, pair: LoadedPair) -> None:
    with open_peers(pair, ["vllm"]) as groups:
        pids = [contender.engine.pid for contender in groups["vllm"].contenders]  # type: ignore[attr-defined]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)


def test_one_that_cannot_start_ends_those_before_it(
    root: Path, pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PEER_FAULT", "start")
    with raises_code("engine_failed", "vllm/autoregressive"), open_peers(pair, ["vllm"]):
        pytest.fail("it has not started")


@pytest.mark.parametrize(("fault", "ended"), [("start", "exit code 1"), ("die later", "prompt p")])
def test_a_peer_that_crashes_is_left_out_and_the_others_are_measured(
    root: Path, pair: LoadedPair, monkeypatch: pytest.MonkeyPatch, fault: str, ended: str
) -> None:
    """While it starts, or in the middle of the bench."""
    monkeypatch.setenv("FAKE_PEER_FAULT", f"{fault}@ngram")
    report = run_bench(
        pair,
        [],
        PROMPTS,
        StrategyResources(),
        BenchSettings(max_tokens=6, runs=2, peers=("vllm",), threads=1),
        cost_ratios=False,
        left_out={},
    )
    assert list(report.strategies) == ["autoregressive"]
    assert list(report.peers["vllm"]) == ["autoregressive", "draft_model"]
    assert list(report.left_out) == ["vllm/ngram"]
    assert ended in report.left_out["vllm/ngram"]
    assert "best lossless / fastest of vllm" not in {row.name for row in report.headlines}
    assert "autoregressive / vllm, plain" in {row.name for row in report.headlines}


def test_models_are_read_from_where_they_were_loaded_and_others_are_written(
    root: Path, pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_folder(pair, "target") == Path(pair.modules["target"].name_or_path)
    pair.modules["draft"].name_or_path = ""  # as of a distilled draft
    monkeypatch.setattr(
        type(pair.tokenizer), "save_pretrained", lambda self, into: None, raising=False
    )
    folder = model_folder(pair, "draft")
    assert folder.is_relative_to(root)
    assert (folder / "model.safetensors").is_file()
    assert model_folder(pair, "draft") == folder


def test_a_folder_that_was_not_finished_is_not_there(root: Path) -> None:
    def fail(into: Path) -> None:
        (into / "part").touch()
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        made_once("model", fail)
    assert list((root / "models").iterdir()) == []


def test_gguf_has_the_same_weights_as_transformers_reads_it(root: Path, pair: LoadedPair) -> None:
    """transformers undoes the order of queries and keys, so equal logits say that ours is
    llama.cpp's."""
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    file = gguf_of(pair)
    read = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    )
    ids = torch.tensor([[5, 9, 3, 7, 11]])
    with torch.no_grad(), own_attention(pair.modules["target"]):
        expected = pair.modules["target"](ids).logits
        assert torch.equal(read(ids).logits.argmax(-1), expected.argmax(-1))
        assert torch.allclose(read(ids).logits, expected, atol=1e-4)


@pytest.mark.parametrize(("weights", "kind"), [("int8", "Q8_0"), ("int4", "Q4_1")])
def test_gguf_rounds_what_our_layers_round(tmp_path: Path, weights: Any, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=24, num_hidden_layers=1, **sizes)
    write_gguf(LlamaForCausalLM(config), tmp_path / "m.gguf", weights=weights)
    tensors = {
        one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors
    }
    assert tensors["blk.0.ffn_gate.weight"] == kind
    assert tensors["token_embd.weight"] == "F32", "embeddings and head keep their weights"
    assert tensors["blk.0.attn_norm.weight"] == "F32"


def test_gguf_keeps_bfloat16(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    module = llama(1, dtype=torch.bfloat16)
    write_gguf(module, tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert "output.weight" not in tensors, "a tied head is stored once"
    gate = tensors["blk.0.ffn_gate.weight"]
    assert gate.tensor_type.name == "BF16"
    values = torch.from_numpy(gguf.dequantize(gate.data, gate.tensor_type).copy())
    assert torch.equal(values.to(torch.bfloat16), module.model.layers[0].mlp.gate_proj.weight)
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"attention_bias": True},
    ],
)
def test_a_model_that_gguf_would_not_describe_is_refused(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    pytest.importorskip("gguf")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        **settings,
    )
    with raises_code("no_gguf", "llama.cpp out of peers"):
        write_gguf(LlamaForCausalLM(config), tmp_path / "m.gguf")
    with raises_code("no_gguf", "gpt_neo"):
        write_gguf(module_of("gpt_neo"), tmp_path / "n.gguf")


def test_every_weight_has_a_name() -> None:
    names = [name for name, _ in renamed(llama(2))]
    assert len(names) == len(set(names)) == 2 * 9 + 2
