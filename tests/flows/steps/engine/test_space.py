"""What a pair's engine is made with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.engines.vllm_methods import VllmFiles
from draftwell.flows.steps.engine.space import EngineSpace
from tests.support.errors import raises_code
from tests.support.peers.environments import install


def space_on(device: str) -> EngineSpace:
    workspace: Any = SimpleNamespace(device=device, dtype="float32")
    made = EngineSpace(workspace, 1)
    vars(made)["files"] = VllmFiles(Path("target"))
    return made


def test_two_engines_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself vLLM takes .92 of the memory, and no second one starts beside it."""
    install(tmp_path / "peers", monkeypatch, ("vllm",))
    monkeypatch.delenv("DRAFTWELL_VLLM_MEMORY", raising=False)
    assert 0.3 < space_on("cuda:0").engine("off").fixed["gpu_share"] < 0.5
    assert space_on("cpu").engine("off").fixed["gpu_share"] is None
    monkeypatch.setenv("DRAFTWELL_VLLM_MEMORY", ".3")
    assert space_on("cuda").engine("off").fixed["gpu_share"] == 0.3
    for wrong in ("1.2", "0", "half"):
        monkeypatch.setenv("DRAFTWELL_VLLM_MEMORY", wrong)
        with raises_code("bad_engine_setting", wrong, "0.4"):
            space_on("cuda").engine("off")


def test_every_temperature_of_a_class_finds_what_the_class_was_tuned_to(tmp_path: Path) -> None:
    """A file for each temperature would be judged for none but the one that tuned it."""
    workspace: Any = SimpleNamespace(folder=lambda kind: tmp_path / kind)
    space = EngineSpace(workspace, 1)
    assert space.config_folder(0) == tmp_path / "engine_config"
    assert {space.config_folder(t) for t in (1e-5, 0.7, 1.0)} == {
        tmp_path / "engine_config_sampled"
    }
