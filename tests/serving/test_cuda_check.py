"""Before a server for CUDA is ready: what is wrong with driver and build is said in a line, and
graphs are captured. On stand-ins."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import draftwell.serving.server.model.loading as loading
from draftwell.serving.device import cuda_problem, driver_problem, has_code_for
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from tests.support.models.llama_shapes import llama
from tests.support.server.bundles import load_bundle, make_bundle, save_tiny_models


@pytest.mark.parametrize(
    ("driver", "built_for", "said"),
    [
        (0, "13.0", "no NVIDIA driver"),
        (12040, "13.0", "supports CUDA 12.4, torch was built for 13.0"),
        (13000, "13.1", "CUDA_VISIBLE_DEVICES"),
        (13010, "12.8", "CUDA_VISIBLE_DEVICES"),
        (None, "13.0", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_wrong_with_the_driver_is_named(
    driver: int | None, built_for: str, said: str
) -> None:
    line = driver_problem(driver, built_for)
    assert said in line
    assert "\n" not in line


class FakeCuda:
    """torch.cuda of a machine with one GPU."""

    def __init__(self, capability: tuple[int, int]):
        self.capability = capability

    def is_available(self) -> bool:
        return True

    def get_device_capability(self) -> tuple[int, int]:
        return self.capability

    def get_device_name(self) -> str:
        return "A GPU"

    def get_arch_list(self) -> list[str]:
        return ["sm_80", "sm_90", "compute_90"]


@pytest.mark.parametrize(
    ("capability", "said"),
    [((6, 1), "no code for this GPU (A GPU, sm_61"), ((8, 6), None), ((12, 0), None)],
)
def test_a_gpu_that_the_build_has_no_code_for_is_named(
    capability: tuple[int, int], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "cuda", FakeCuda(capability))
    monkeypatch.setattr(
        torch,
        "ones",
        lambda *words, **options: SimpleNamespace(add_=lambda n: SimpleNamespace(item=lambda: 2)),
    )
    assert (said or "") in (cuda_problem() or "")
    assert (cuda_problem() is None) is (said is None)


def test_a_gpu_that_fails_and_a_build_without_cuda_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*words: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: device-side\nassert")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "cuda", FakeCuda((9, 0)))
    monkeypatch.setattr(torch, "ones", fails)
    assert (
        cuda_problem()
        == "the GPU does not compute (CUDA error: device-side assert): see nvidia-smi"
    )
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build without CUDA" in str(cuda_problem())


def test_code_of_an_earlier_minor_version_runs_and_ptx_of_any_earlier_one() -> None:
    assert has_code_for((8, 9), ["sm_86"])
    assert not has_code_for((8, 0), ["sm_86"])
    assert has_code_for((10, 0), ["compute_90"])
    assert not has_code_for((9, 0), ["sm_100a", "gfx942"])


class Captures:
    """A model that captures."""

    def __init__(self, complete: bool = True):
        self.asked: list[float] = []
        self.complete = complete

    def warm_up(self, seconds: float) -> bool:
        self.asked.append(seconds)
        return self.complete


def full(seconds: float) -> bool:
    raise torch.OutOfMemoryError("out of memory")


def test_graphs_are_captured_on_cuda_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = Captures(), Captures(complete=False)
    models = {"target": target, "draft": draft, "draft_onnx": object()}
    loading.capture_graphs(SimpleNamespace(device="cpu", models=models))  # type: ignore[arg-type]
    assert target.asked == draft.asked == []
    with caplog.at_level(logging.INFO):
        loading.capture_graphs(SimpleNamespace(device="cuda", models=models), 60.0)  # type: ignore[arg-type]
    (first,), (second,) = target.asked, draft.asked
    assert 29 < first <= 30
    assert 59 < second <= 60, "what the target did not need is the draft's"
    assert "graphs of the draft were not all captured in 60 s" in caplog.text
    monkeypatch.setattr(target, "warm_up", full)
    loading.capture_graphs(SimpleNamespace(device="cuda", models=models))  # type: ignore[arg-type]
    assert (
        "graphs of the target were not all captured because the device's memory is full"
        in caplog.text
    )


def test_a_server_captures_graphs_once_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Any] = []
    monkeypatch.setattr(loading, "capture_graphs", captured.append)
    served = load_bundle(
        make_bundle(tmp_path / "bundle", save_tiny_models(tmp_path / "models"), "vanilla_sd"),
        slots=2,
        max_context=64,
    )
    assert captured == [served.pair]
    load_bundle(tmp_path / "bundle", served, slots=2, max_context=64)
    assert len(captured) == 1, "models that serve have their graphs"


def test_warming_up_ends_in_time_and_captures_every_bucket_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, captured = CudaLlama(llama(), slots=4), []
    monkeypatch.setattr(model, "_step", captured.append)
    assert not model.warm_up(seconds=0.0)
    assert captured == []
    assert model.warm_up(seconds=60.0)
    assert captured == [16, 32, 64, 128, 256, 512]
