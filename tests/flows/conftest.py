"""One tiny pair and one Prefect server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_command
from tests.support.loop.tiny_files import write_pair, write_prompts
from tests.support.patching import replace_everywhere


@pytest.fixture(scope="session")
def pair_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """YAML file of a tiny pair."""
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve short prompts."""
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder to work in."""
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DRAFTWELL_MODELS", str(folder / "models"))
        yield folder


@pytest.fixture(scope="module", autouse=True)
def starts_are_not_timed() -> Iterator[None]:
    """The gate starts a process that does nothing instead of one that loads the bundle;
    test_gate.py starts a real one."""
    from draftwell.components.gate import footprint

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(footprint, "CHILD", "pass")
        yield


@pytest.fixture(scope="module", autouse=True)
def profiles_are_short(request: pytest.FixtureRequest) -> Iterator[None]:
    """A hardware profile, which every command that tunes or calibrates measures in its empty home,
    takes fewer passes to a median here.

    Not in trials of the default pair, which are about times. What a profile is worth is tested in
    tests/components/calibrate.
    """
    if request.node.get_closest_marker("soak"):
        yield
        return
    from draftwell.components.calibrate.hardware_profile import measure_profile

    defaults = measure_profile.__kwdefaults__
    assert "repeats" in defaults
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "repeats", 3)
        yield


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server with a database of its own, for this session; PREFECT_HOME is a temporary folder
    already (tests/conftest.py).

    The one server of a process: Prefect's thread that sends events, of which task runs are made,
    stays with the server it began with.
    """
    from prefect.events.worker import EventsWorker
    from prefect.testing.utilities import prefect_test_harness

    EventsWorker.drain_all()
    with prefect_test_harness(server_startup_timeout=300):  # seconds; a busy machine
        yield


@pytest.fixture
def cuda_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a CUDA device, as far as its one question goes."""
    replace_everywhere(monkeypatch, "draftwell.serving.device.cuda_available", lambda: True)


@pytest.fixture
def run() -> Callable[..., Any]:
    """Run `draftwell` in this process."""
    return run_command
