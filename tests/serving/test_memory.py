"""What is free, from planted files of the system, and what a second set of models needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.memory import free_memory, needed

MB = 2**20
INFO = {"proc/meminfo": f"MemTotal: {9 << 20} kB\nMemAvailable: {1000 << 10} kB\n"}
V2 = {**INFO, "proc/self/cgroup": "0::/pod/one\n"}
V1 = {**INFO, "proc/self/cgroup": "4:memory:/docker/ab\n3:cpu:/docker/ab\n"}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, limit: int | str, used: int, cache: int = 0) -> dict[str, str]:
    place, active = f"sys/fs/cgroup/{folder}", cache // 5
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.current": f"{used}\n",
        f"{place}/memory.stat": f"inactive_file {cache - active}\nactive_file {active}\n",
    }


def v1(limit: int, used: int) -> dict[str, str]:
    place = "sys/fs/cgroup/memory/docker/ab"
    return {
        f"{place}/memory.limit_in_bytes": f"{limit}\n",
        f"{place}/memory.usage_in_bytes": f"{used}\n",
        f"{place}/memory.stat": "inactive_file 7\n",
    }


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (INFO, 1000 * MB),
        ({**V2, **v2("pod/one", "max", 5)}, 1000 * MB),
        ({**V2, **v2("pod/one", 300, 100, 50)}, 250),
        ({**V2, **v2("pod/one", "max", 5), **v2("pod", 400, 300)}, 100),
        ({**V2, **v2("", 400, 390)}, 10),
        ({**V1, **v1(500, 100)}, 407),
        ({**V1, **v1(2**63 - 4096, 100)}, 1000 * MB),
    ],
)
def test_the_least_of_machine_and_groups_is_free(
    tmp_path: Path, files: dict[str, str], free: int | None
) -> None:
    assert free_memory("cpu", plant(tmp_path, files)) == free


def test_a_gpu_has_what_the_driver_says_and_what_torch_keeps_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        mem_get_info=lambda device: (700, 1000),
        memory_reserved=lambda device: 90,
        memory_allocated=lambda device: 60,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    assert free_memory("cuda:0") == 730


LLAMA: dict[str, object] = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 8}
LLAMA |= {"hidden_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 2048}
POSITION = 2 * 3 * 2 * 8


def pair_of(root: Path, target: dict[str, torch.Tensor], config: dict[str, object]) -> PairFiles:
    """A pair of these weights and a draft of 100 numbers without a configuration."""
    draft = {"weight": torch.zeros(100, dtype=torch.bfloat16)}
    for role, tensors in (("target", target), ("draft", draft)):
        (root / role).mkdir()
        save_file(tensors, root / role / "model.safetensors")
    (root / "target" / "config.json").write_text(json.dumps(config))
    return PairFiles("tiny", root / "target", root / "draft")


def test_what_a_pair_needs_follows_its_files(tmp_path: Path) -> None:
    files = pair_of(tmp_path, {"weight": torch.zeros(50, 5)}, LLAMA)
    assert needed(files, "float32", "cpu", 4, None) == (4200, 4 * 4 * 2048 * POSITION)
    assert needed(files, "bfloat16", "cpu", 4, 100) == (2100, 4 * 2 * 100 * POSITION)
    assert needed(files, "bfloat16-int8", "cuda", 1, 100)[0] == pytest.approx(770)


@pytest.mark.parametrize(
    ("method", "name", "bytes_of_one", "values"),
    [("fp8", "a.weight", torch.float8_e4m3fn, 250), ("mxfp4", "a_blocks", torch.uint8, 500)],
)
def test_quantised_weights_that_are_made_full_count_as_full(
    tmp_path: Path, method: str, name: str, bytes_of_one: torch.dtype, values: int
) -> None:
    packed = {name: torch.zeros(250, dtype=bytes_of_one)}
    config = {**LLAMA, "quantization_config": {"quant_method": method}}
    files = pair_of(tmp_path, packed, config)
    assert needed(files, "bfloat16", "cpu", 1, 100)[0] == 3 * 2 * (values + 100)


def test_the_slots_are_those_of_the_text_part_and_of_other_names(tmp_path: Path) -> None:
    """A model of images and text in bfloat16 that is computed in float32, and GPT-2's names."""
    text = {**LLAMA, "head_dim": 8, "model_type": "gemma3_text"}
    seeing: dict[str, object] = {"model_type": "gemma3", "dtype": "bfloat16", "text_config": text}
    older: dict[str, object] = {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_embd": 64,
        "n_head": 8,
        "n_positions": 2048,
    }
    for at, (config, position) in enumerate(((seeing, POSITION), (older, 2 * 3 * 64))):
        (tmp_path / str(at)).mkdir()
        weights = {"weight": torch.zeros(250, dtype=torch.bfloat16)}
        files = pair_of(tmp_path / str(at), weights, config)
        assert needed(files, "float32", "cpu", 1, 100) == (4200, 4 * 100 * position)


FREED = """
import weakref
from draftwell.serving.memory import collect_garbage

class Weights:
    def __init__(self):
        self.itself = self

old = Weights()
seen = weakref.ref(old)
collect_garbage()
assert seen() is not None
del old
collect_garbage()
assert seen() is None, "what was looked at once is never freed"
"""


def test_what_was_left_out_once_is_freed_when_it_is_garbage() -> None:
    """In a process of its own: here `gc.freeze` is the tests'."""
    subprocess.run([sys.executable, "-c", FREED], check=True)
