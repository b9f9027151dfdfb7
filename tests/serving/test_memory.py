"""What is free, from planted files of the system, and what a second set of models needs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
        mem_get_info=lambda device: (700, 1000),
        memory_reserved=lambda device: 90,
        memory_allocated=lambda device: 60,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    assert free_memory("cuda:0") == 730


def test_what_a_pair_needs_follows_its_files(tmp_path: Path) -> None:
    for role, size in (("target", 1000), ("draft", 100)):
        (tmp_path / role).mkdir()
        (tmp_path / role / "model.safetensors").write_bytes(b"0" * size)
    config = {"dtype": "float32", "num_hidden_layers": 3, "num_attention_heads": 8}
    config |= {"hidden_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    files = PairFiles("tiny", tmp_path / "target", tmp_path / "draft")
    position = 2 * 3 * 2 * 8
    assert needed(files, "float32", "cpu", 4, None) == (3300, 4 * 4 * 2048 * position)
    # the draft says nothing of itself: as it is computed in
    assert needed(files, "bfloat16", "cpu", 4, 100) == (1800, 4 * 2 * 100 * position)
    assert needed(files, "bfloat16-int8", "cuda", 1, 100)[0] == pytest.approx(660)
