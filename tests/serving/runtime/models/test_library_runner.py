"""Compiled libraries on the threads of models that run at once: the same outputs, Python's lock
free, nothing kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from draftwell.serving.runtime.engine.workers import bind_thread
from draftwell.serving.runtime.models.compiled_library import LIBRARY, build_library, load
from draftwell.serving.runtime.models.library_runner import (
    LibraryRunner,
    SharedRunner,
    beside_others,
)
from tests.support.models.other_processors import compiles

SIZE = 1200


class Doubling:
    """Torch's runner of a library that doubles."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        return [2 * one for one in inputs]


class Powers(torch.nn.Module):
    """Two outputs, and so much work that another thread gets a turn."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(4):
            x = torch.tanh(x @ y)
        return x, x + y


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("library") / LIBRARY
    build_library(Powers(), (torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)), (None, None), file)
    return file


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    """A thread as the engine has one for each model that runs at once."""
    with ThreadPoolExecutor(1, initializer=bind_thread, initargs=((), 1)) as pool:
        yield pool


def inputs(seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, SIZE, generator=random) / SIZE**0.5 for _ in range(2)]


@compiles
def test_outputs_are_those_of_torchs_runner(library: Path, worker: ThreadPoolExecutor) -> None:
    runner = LibraryRunner(load(library), library)
    for seed in range(2):
        mine, expected = (
            worker.submit(one.run, inputs(seed)).result() for one in (runner, load(library))
        )
        assert len(mine) == 2
        assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))


def turns(pool: ThreadPoolExecutor, work: Callable[[], object]) -> int:
    """How often another thread has a turn of Python between the beginning and the end of some
    work."""
    began, ended, count = threading.Event(), threading.Event(), 0

    def run() -> None:
        began.set()
        try:
            work()
        finally:
            ended.set()

    done = pool.submit(run)
    began.wait()
    while not ended.is_set():
        count += 1
    done.result()
    return count


@compiles
def test_others_have_their_turns_while_a_library_computes(
    library: Path, worker: ThreadPoolExecutor
) -> None:
    """Torch's runner lets nobody: two models in one process would take turns layer by layer."""
    shared, held, given = LibraryRunner(load(library), library), load(library), inputs()
    worker.submit(shared.run, given).result()
    # which has some around the call
    assert turns(worker, lambda: shared.run(given)) > 3 * turns(worker, lambda: held.run(given))


@compiles
def test_nothing_of_a_call_is_kept(library: Path) -> None:
    """Outputs of 60 calls are 690 MB; their handles were once left to nobody."""
    runner, given = SharedRunner(library), inputs()
    runner.run(given)
    memory = psutil.Process().memory_info
    before = memory().rss
    for _ in range(60):
        runner.run(given)
    assert memory().rss - before < 100e6


@compiles
def test_a_failure_is_an_error_and_no_crash(library: Path) -> None:
    runner = SharedRunner(library)
    with pytest.raises(RuntimeError, match=r"failed: .*mm_out"):
        runner.run([torch.zeros(3, 3), torch.zeros(4, 4)])
    with pytest.raises(RuntimeError, match="takes 2 inputs, not 1"):
        runner.run(inputs()[:1])
    assert len(runner.run(inputs())) == 2, "works on"


def test_a_library_whose_file_is_gone_is_run_by_torch_alone(
    tmp_path: Path, worker: ThreadPoolExecutor
) -> None:
    """Such as that of a bundle that was replaced while it was served."""
    runner = LibraryRunner(Doubling(), tmp_path / LIBRARY)
    assert runner.run([torch.ones(1)])[0] == 2
    for _ in range(2):
        assert worker.submit(runner.run, [torch.ones(1)]).result()[0] == 2


def test_a_block_beside_others_ends_with_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of a pool does other work afterwards."""
    made: list[Path] = []

    def shared(file: Path) -> Doubling:
        made.append(file)
        return Doubling()

    monkeypatch.setattr("draftwell.serving.runtime.models.library_runner.SharedRunner", shared)
    runner = LibraryRunner(Doubling(), tmp_path / LIBRARY)
    runner.run([torch.ones(1)])
    assert made == []
    with beside_others(), beside_others():
        runner.run([torch.ones(1)])
    other = LibraryRunner(Doubling(), tmp_path / "other")
    other.run([torch.ones(1)])
    assert made == [tmp_path / LIBRARY]
