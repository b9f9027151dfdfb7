"""Stations spread over workers: the same trace and the same trials as without, on threads and on a
real Ray cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.collect import work as collection
from draftwell.components.collect.plan import ForeignTrace
from draftwell.flows.workers import task_runners as runners
from draftwell.flows.workers.task_runners import WorkerPool, failure_of, worker_pool_for
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from tests.support.errors import raises_code
from tests.support.paths import REPO

SHARD = "write a shard"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="ray is not installed: pip install -c constraints.txt -e '.[ray]'",
)


def test_how_a_station_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_pool_for("threads", 1) is None
    assert worker_pool_for("threads", 2, threads=5) == WorkerPool("threads", 2, 2)
    assert worker_pool_for("threads", 4, threads=2) == WorkerPool("threads", 4, 1), (
        "never less than one thread each"
    )
    with raises_code("unknown_runner", "threads", "ray"):
        worker_pool_for("dask", 2)
    with raises_code("threads_share_gpu", "GPU"):
        worker_pool_for("threads", 2, device="cuda")
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises_code("ray_missing", "-e '.[ray]'"):
        worker_pool_for("ray", 2)


class Ray:
    """In the place of a cluster of two machines: what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.options: dict[str, Any] = {}

    def init(self, **where: Any) -> None:
        self.asked.append(where)

    def shutdown(self) -> None:
        self.asked.append("shutdown")

    def nodes(self) -> list[dict[str, Any]]:
        machine = {"Alive": True, "Resources": {"CPU": 16.0}}
        return [machine, machine, {**machine, "Alive": False}]

    def remote(self, work: Any) -> Any:
        def options(**given: Any) -> Any:
            self.options = given
            return SimpleNamespace(remote=lambda *part, **call: ref(lambda: work(*part, **call)))

        def ref(part: Callable[[], Any]) -> Any:
            future: Future[Any] = Future()
            try:
                future.set_result(part())
            except Exception as error:
                wrapped = RuntimeError("ray::write a shard")
                wrapped.cause = error  # type: ignore[attr-defined]
                future.set_exception(wrapped)
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(options=options)


@pytest.mark.parametrize(
    ("pool", "address", "where", "threads"),
    [
        (WorkerPool("ray", 4, None), "auto", {}, 8),
        (WorkerPool("ray", 1, None), "auto", {}, 16),
        (WorkerPool("ray", 4, 2), "auto", {}, 2),
        (WorkerPool("ray", 4, 2), None, {"num_cpus": 8, "include_dashboard": False}, 2),
        (WorkerPool("ray", 64, None, "cuda"), "auto", {}, 1),
    ],
)
def test_workers_of_a_cluster_get_its_cores_and_not_the_drivers(
    pool: WorkerPool,
    address: str | None,
    where: dict[str, Any],
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its machines have sixteen; a part never asks for more than one machine has."""
    ray, made = Ray(), list[Any]()
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)

    def write(job: Path, threads: int, index: int) -> int:
        if index == 3:
            raise ForeignTrace("the trace is foreign: mend it")
        made.append(threads)
        return index

    monkeypatch.setitem(runners.worker_jobs.WORK, SHARD, write)
    found: list[int] = []
    with raises_code("workers_failed", "1 of 4 parts failed, the first with: the trace is foreign"):
        runners.run(
            pool, SHARD, Path("job"), [{"index": i} for i in range(4)], lambda _, i: found.append(i)
        )
    assert (found, made) == ([0, 1, 2], [threads] * 3)
    assert ray.asked == [{"log_to_driver": False, **where}, "shutdown"]
    assert os.environ.get("RAY_AUTH_MODE") == (None if address else "token"), (
        "a cluster of our own asks for a token; another's has settings of its own"
    )
    gpus = {"num_gpus": 1} if pool.device == "cuda" else {}
    assert ray.options == {
        "name": SHARD,
        "num_cpus": threads,
        "max_retries": runners.LIVES,
        **gpus,
    }


def test_what_failed_parts_become() -> None:
    mistake = ForeignTrace("the trace is foreign: mend it")
    told = failure_of([mistake, mistake], 2)
    assert str(told) == "the trace is foreign: mend it"
    assert type(told) is DraftwellError, (
        "a driver that forgets foreign traces must not take a worker's for its own"
    )
    assert "1 of 2 parts failed, the first with: the trace is foreign" in str(
        failure_of([mistake], 2)
    )
    assert "RuntimeError" in str(failure_of([RuntimeError()], 1))
    assert "run the same command again" in str(failure_of([RuntimeError("a\nb")], 1))


@pytest.fixture
def shards_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "SHARD_PROMPTS", 2)


@pytest.fixture
def collect(
    run: Any, pair_file: Path, prompts_file: Path, tmp_path: Path
) -> Callable[..., tuple[Any, TraceSet]]:
    """Runs `draftwell step collect` into a folder of its own."""

    def collect(name: str, *more: Any) -> tuple[Any, TraceSet]:
        done = run(
            f"step collect --pair {pair_file} --prompts {prompts_file} --set max_tokens=12 "
            f"--set threads=1 --set out={tmp_path / name}",
            *more,
        )
        return done, TraceSet(tmp_path / name)

    return collect


@pytest.mark.slow
def test_threads_write_the_trace_of_one_process(
    collect: Any,
    own_stores: Path,
    shards_of_two: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, alone = collect("alone")
    assert done.exit_code == 0, (done.output, done.exception)
    real, working, most = runners.worker_jobs.WORK[SHARD], [0], [0]
    counting, together = threading.Lock(), threading.Event()

    def write(job: Path, threads: int, index: int) -> str:
        with counting:
            working[0] += 1
            most[0] = max(most[0], working[0])
            if working[0] > 1:
                together.set()
        together.wait(60)  # a busy machine may begin the next part late
        try:
            return str(real(job, threads, index))
        finally:
            with counting:
                working[0] -= 1

    monkeypatch.setitem(runners.worker_jobs.WORK, SHARD, write)
    done, spread = collect("spread", "--set workers=3")
    assert done.exit_code == 0, (done.output, done.exception)
    assert len(spread.shards) == 6
    assert [path.read_bytes() for path in spread.shards] == [
        path.read_bytes() for path in alone.shards
    ]
    assert spread.digest() == alone.digest()
    assert 1 < most[0] <= 3, "they did work at once, and no more than were asked for"
    assert not list(own_stores.rglob(".job-*"))


@pytest.mark.slow
def test_a_shard_that_fails_is_told_and_the_others_stand(
    collect: Any,
    own_stores: Path,
    shards_of_two: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, tries = runners.worker_jobs.WORK[SHARD], []

    def write(job: Path, threads: int, index: int) -> str:
        tries.append(index)
        if index == 1:
            raise OSError(5, "Input/output error")
        return str(real(job, threads, index))

    with monkeypatch.context() as patch:
        patch.setitem(runners.worker_jobs.WORK, SHARD, write)
        done, spread = collect("spread", "--set workers=2")
    assert done.exit_code == 2
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: 1 of 6 parts failed, the first with: [Errno 5]")
    assert line.endswith("run the same command again, it resumes with what is missing")
    assert {index: tries.count(index) for index in range(6)} == dict.fromkeys(range(6), 1)
    assert len(spread.shards) == 5
    done, spread = collect("spread", "--set workers=2")
    assert done.exit_code == 0, (done.output, done.exception)
    assert spread.digest() == collect("alone")[1].digest()


@pytest.mark.slow
def test_a_full_disk_under_a_worker_is_told_as_one(
    collect: Any,
    own_stores: Path,
    shards_of_two: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []

    def write(job: Path, threads: int, index: int) -> str:
        tries.append(index)
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(runners.worker_jobs.WORK, SHARD, write)
    done, _ = collect("spread", "--set workers=2")
    assert done.exit_code == 2
    assert done.stderr.strip().splitlines()[-1].startswith("Error: no room left to write")
    assert sorted(tries) == list(range(6)), "there is no more room the second time"


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["threads", pytest.param("ray", marks=needs_ray)])
def test_replays_by_workers_choose_the_same_configs(
    run: Any,
    pair_file: Path,
    prompts_file: Path,
    own_stores: Path,
    runner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    few = f"--pair {pair_file} --prompts {prompts_file}"
    assert run("step collect", few, "--set limit=6 --set max_tokens=12").exit_code == 0
    space = own_stores / "draftwell" / "pairs" / "tiny" / "float32"
    reports = []
    for more in ("", f"--set runner={runner} --set workers=2"):
        study = own_stores / f"study{len(reports)}.jsonl"
        done = run(
            "step choose",
            few,
            f"--set limit=2 --set max_tokens=8 --set trials=24 --set publish=false --set "
            f"threads=1 --set study={study}",
            more,
        )
        assert done.exit_code == 0, (done.output, done.exception)
        reports.append(json.loads((space / "cpu" / "reports" / "tuning.json").read_text()))
    one, spread = (
        [trial for trial in report["trials"] if trial["source"] == "replayed"] for report in reports
    )
    assert len(one) >= 24
    assert spread == one
    assert not list(own_stores.rglob(".job-*"))


@pytest.mark.slow
@needs_ray
def test_a_ray_worker_is_killed_midway_and_nothing_is_lost(
    collect: Any,
    own_stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL, while it writes and others have written: Ray begins the shard again, and the trace
    is that of one process."""
    # workers import this checkout, as they would an installed package
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setattr(collection, "SHARD_PROMPTS", 1)
    done, alone = collect("alone")
    assert done.exit_code == 0, (done.output, done.exception)
    killed: list[tuple[int, int]] = []

    def kill_one() -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until and not killed:
            shards = len(list((tmp_path / "spread").glob("shard-*.parquet")))
            if shards and (pid := one_at_work()) is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append((pid, shards))
            time.sleep(0.005)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    done, spread = collect("spread", "--set runner=ray --set workers=2")
    killer.join(1)
    assert done.exit_code == 0, (done.output, done.exception)
    assert killed, "no worker was caught at work: the test proved nothing"
    assert 0 < killed[0][1] < 12, "it died midway"
    assert [path.name for path in spread.shards] == [f"shard-{i:05d}.parquet" for i in range(12)]
    assert spread.digest() == alone.digest()
    assert not list((tmp_path / "spread").glob(".shard-*"))


def one_at_work() -> int | None:
    """A process below this one that Ray lets write a shard; Ray gives it the task's name."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        try:
            if "ray::write a shard" in " ".join(process.cmdline()):
                return int(process.pid)
        except psutil.Error:
            continue
    return None
