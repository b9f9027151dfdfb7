"""The path by which a vLLM that runs takes other weights of its draft, and what reads them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from starlette.applications import Starlette
from starlette.testclient import TestClient

from draftwell.registry.bundles.vllm.plugin.draftwell_vllm.draft_route import (
    HEADER,
    PATH,
    DraftRoute,
)


class Engine:
    """What the path asks of vLLM, and whether loading fails."""

    def __init__(self, folder: Path):
        config = SimpleNamespace(model=str(folder), method="eagle3", num_speculative_tokens=3)
        self.vllm_config = SimpleNamespace(speculative_config=config)
        self.calls: list[Any] = []
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append(name)
            if name == "collective_rpc":
                self.calls.append(kwargs["kwargs"]["update_info"]["folder"])
                if self.fails:
                    raise RuntimeError("Worker failed with error 'no'")

        return call


def head(folder: Path, layers: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"num_hidden_layers": layers, "transformers_version": str(folder)})
    )
    return folder


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    root = tmp_path / "tiny"
    monkeypatch.setenv("DRAFTWELL_SWAP_KEY", "secret")
    monkeypatch.setenv("DRAFTWELL_DRAFTS", str(root))
    monkeypatch.setenv("DRAFTWELL_BUNDLE", "tiny/1-cpu")
    engine, route, app = Engine(head(root / "1-cpu" / "head")), DraftRoute(), Starlette()
    route.attach_router(app)
    asyncio.run(route.init_state(engine, None, None))
    client = TestClient(app, headers={HEADER: "secret"})
    return SimpleNamespace(root=root, engine=engine, client=client, route=route)


def load(served: SimpleNamespace, folder: str) -> Any:
    return served.client.post(PATH, json={"folder": folder, "bundle": "tiny/2-cpu"})


def test_other_weights_are_loaded_between_requests_and_known_from_then_on(
    served: SimpleNamespace,
) -> None:
    new = head(served.root / "2-cpu" / "head")
    assert served.client.get(PATH).json()["bundle"] == "tiny/1-cpu"
    assert load(served, "2-cpu/head").json() == {
        "folder": str(new),
        "bundle": "tiny/2-cpu",
        "method": "eagle3",
        "num_speculative_tokens": 3,
    }
    assert served.engine.calls == [
        "pause_generation",
        "start_draft_weight_update",
        "collective_rpc",
        str(new),
        "finish_weight_update",
        "resume_generation",
    ]


def test_requests_go_on_with_the_old_draft_where_loading_fails(served: SimpleNamespace) -> None:
    head(served.root / "2-cpu" / "head")
    served.engine.fails = True
    failed = load(served, "2-cpu/head")
    assert (failed.status_code, "Worker failed" in failed.text) == (500, True)
    assert served.engine.calls[-1] == "resume_generation"
    assert "finish_weight_update" not in served.engine.calls
    assert os.environ["DRAFTWELL_BUNDLE"] == "tiny/1-cpu"
    assert served.client.get(PATH).json()["folder"].endswith("1-cpu/head")


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("../away/head", "is not below"),
        ("2-cpu", "has no config.json"),
        ("deeper/head", "has another num_hidden_layers"),
    ],
)
def test_other_folders_are_refused_and_nothing_is_asked_of_vllm(
    served: SimpleNamespace, tmp_path: Path, folder: str, said: str
) -> None:
    head(tmp_path / "away" / "head")
    head(served.root / "deeper" / "head", layers=2)
    refused = load(served, folder)
    assert (refused.status_code, said in refused.text) == (409, True), refused.text
    assert served.engine.calls == []


def test_whoever_comes_while_a_draft_is_loaded_is_told_to_ask_again(
    served: SimpleNamespace,
) -> None:
    head(served.root / "2-cpu" / "head")
    served.route._lock = SimpleNamespace(locked=lambda: True)
    busy = load(served, "2-cpu/head")
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "2")
    assert served.engine.calls == []


def test_without_its_key_there_is_nothing(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    head(served.root / "2-cpu" / "head")
    for key in ("", "other"):
        asked = served.client.post(PATH, json={"folder": "2-cpu/head"}, headers={HEADER: key})
        assert asked.status_code == 404
    assert served.engine.calls == []
    monkeypatch.delenv("DRAFTWELL_SWAP_KEY")
    app = Starlette()
    DraftRoute().attach_router(app)
    assert TestClient(app).get(PATH).status_code == 404


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module over stubs of vLLM's classes."""

    class Base:
        def __class_getitem__(cls, item: Any) -> Any:
            return cls

    base: Any = ModuleType("vllm.distributed.weight_transfer.base")
    base.WeightTransferEngine, base.WeightTransferInitInfo = Base, object
    base.WeightTransferUpdateInfo = object
    reload: Any = ModuleType("vllm.model_executor.model_loader.reload")
    steps: list[str] = []
    reload.initialize_layerwise_reload = lambda model: steps.append("begun")
    reload.finalize_layerwise_reload = lambda model, config: steps.append("ended")
    for module in (base, reload):
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "draftwell.registry.bundles.vllm.plugin.draftwell_vllm.weights"
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module(name)
    yield SimpleNamespace(module=found, steps=steps)
    sys.modules.pop(name, None)


def updated(weights: Any, started_with: Path, folder: Path, fails: bool = False) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def read(rows: Any) -> None:
        seen.update(rows)
        if fails:
            raise RuntimeError("half-way")

    engine = weights.module.FolderWeights()
    engine.model = SimpleNamespace(load_weights=read)
    engine.model_config = SimpleNamespace(model=str(started_with))
    engine.receive_weights(weights.module.Folder(str(folder)))
    return seen


def test_a_folder_of_the_same_shapes_is_read(weights: Any, tmp_path: Path) -> None:
    for name, value in (("old", 1.0), ("new", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"fc.weight": torch.full((2, 3), value)}, tmp_path / name / "model.safetensors")
    seen = updated(weights, tmp_path / "old", tmp_path / "new")
    assert {name: one.tolist() for name, one in seen.items()} == {"fc.weight": [[2.0] * 3] * 2}
    assert weights.steps == ["begun", "ended"]
    with pytest.raises(RuntimeError, match="half-way"):
        updated(weights, tmp_path / "old", tmp_path / "new", fails=True)
    assert weights.steps[2:] == ["begun", "ended"], "else vLLM keeps layers without weights"


@pytest.mark.parametrize(
    "other",
    [{"fc.weight": torch.ones(3, 2)}, {"fc.weight": torch.ones(2, 3).half()}, {}],
)
def test_weights_of_other_shapes_change_nothing(
    weights: Any, tmp_path: Path, other: dict[str, torch.Tensor]
) -> None:
    for name, tensors in (("old", {"fc.weight": torch.ones(2, 3)}), ("new", other)):
        (tmp_path / name).mkdir()
        if tensors:
            save_file(tensors, tmp_path / name / "model.safetensors")
    with pytest.raises(ValueError, match=r"restart vLLM|no safetensors"):
        updated(weights, tmp_path / "old", tmp_path / "new")
    assert weights.steps == []
