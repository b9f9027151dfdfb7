"""Spreading a step over workers: threads of this process, or a Ray cluster.

Collection is spread by shard, the replays of tuning in parts of equal size. The result is that of a
run without workers: the same trace, row by row, and the same trials. What is *measured* is never
spread: a timing taken on another machine, or next to other work on this one, would let the wrong
config win.

Workers read and write files: on a cluster every machine needs the same version of Draftwell, the
same kind of processor, and `$DRAFTWELL_HOME` on a file system that all share, under the same path.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.report.machine import using_threads
from draftwell.components.tune.evidence import Trial
from draftwell.flows.failures import is_full
from draftwell.flows.workers import worker_jobs
from draftwell.serving.device import default_threads
from draftwell.serving.errors import DraftwellError, missing_package

if TYPE_CHECKING:
    from draftwell.components.collect.collect import Spread as ShardSpread
    from draftwell.components.collect.settings import CollectionSettings
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.search.search import Search, Spread as ReplaySpread
    from draftwell.flows.context import StepContext
    from draftwell.serving.runtime.strategies import StrategyChoice

Call = Mapping[str, Any]
"""What says which part of a job is meant."""
Begin = Callable[[str, Path, Call], Future[Any]]
"""Begins a part: name of the work, job and call."""

RUNNERS = ("threads", "ray")
LIVES = 3
"""How often Ray begins a part again whose worker died."""
PARTS = 4
"""Parts of the replays for each worker: a tuning that is killed repeats those that it was killed
in."""


@dataclass(frozen=True)
class WorkerPool:
    """How a step is spread over workers.

    Args:
        runner: one of `RUNNERS`.
        workers: parts at once.
        threads: that each worker's torch computes with; None takes a share of the cluster's cores.
        device: cpu or cuda, of the models.
    """

    runner: str
    workers: int
    threads: int | None
    device: str = "cpu"


def worker_pool_for(
    runner: str, workers: int, *, threads: int | None = None, device: str = "cpu"
) -> WorkerPool | None:
    """How a step is to be spread over workers; None where one worker in this process does it all.

    Args:
        threads: of all workers together, which share them; None takes one for each usable core.
    Raises:
        DraftwellError: an unknown runner, Ray where it is not installed, or several threads for one
            GPU.
    """
    if runner not in RUNNERS:
        raise DraftwellError(
            f"unknown runner {runner!r}: choose {' or '.join(RUNNERS)}", code="unknown_runner"
        )
    if runner == "ray" and find_spec("ray") is None:
        raise missing_package("--set runner=ray needs", "ray", "ray", code="ray_missing")
    if runner == "threads" and workers == 1:
        return None
    if runner == "threads" and device != "cpu":
        raise DraftwellError(
            "several workers on threads would wait for one GPU: use --set workers=1, or --set "
            "runner=ray "
            "with a GPU for each",
            code="threads_share_gpu",
        )
    if threads is None and runner == "threads":
        threads = default_threads()
    return WorkerPool(runner, workers, threads and max(1, threads // workers), device)


def spread_shards(
    pool: WorkerPool,
    step: StepContext,
    prompts: Sequence[Prompt],
    traces: Path,
    settings: CollectionSettings,
) -> ShardSpread:
    """What has the shards of a collection written by workers.

    Args:
        traces: folder of the trace.
    """

    def spread(missing: Sequence[int], found: Callable[[int], None]) -> None:
        with job_folder(step) as job:
            worker_jobs.describe_collection(job, step, prompts, traces, settings)
            count = min(pool.workers, len(missing))
            here = pool.runner == "threads"
            with worker_jobs.loaded(job, step.pair, count) if here else nullcontext():
                calls = [{"index": index} for index in missing]
                run(pool, "write a shard", job, calls, lambda call, _: found(call["index"]))

    return spread


def spread_replays(pool: WorkerPool, step: StepContext, traces: Path) -> ReplaySpread:
    """What has the replays of a tuning made by workers, a part each; `traces` is the trace's
    folder."""

    def spread(
        search: Search, choices: Sequence[StrategyChoice], found: Callable[[Trial], None]
    ) -> None:
        parts = min(len(choices), PARTS * pool.workers)
        calls = [
            {"choices": [choice.to_json() for choice in choices[part::parts]]}
            for part in range(parts)
        ]

        def keep(call: Call, made: Sequence[Mapping[str, Any]]) -> None:
            for trial in made:
                found(Trial.model_validate(trial))

        with job_folder(step) as job:
            worker_jobs.describe_search(job, search, traces, step.pair.fingerprint)
            run(pool, "replay configurations", job, calls, keep)

    return spread


@contextmanager
def job_folder(step: StepContext) -> Iterator[Path]:
    """A folder in the pair's workspace that goes when the job is done."""
    step.workspace.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=step.workspace.root, prefix=".job-") as place:
        yield Path(place)


def run(
    pool: WorkerPool, what: str, job: Path, calls: Sequence[Call], done: Callable[[Call, Any], None]
) -> None:
    """Run a work of `worker_jobs.WORK` once for each call.

    A part that fails does not stop the others, so that a second run has less to do.

    Args:
        done: called here with each part's call and result, in the order of `calls`.
    Raises:
        DraftwellError: what the parts that failed raised, or what became of them.
    """
    failures = list[Exception]()
    with on_threads(pool) if pool.runner == "threads" else on_ray(pool) as begin:
        parts = [begin(what, job, call) for call in calls]
        for call, part in zip(calls, parts, strict=True):
            try:
                done(call, part.result())
            except Exception as error:
                failures.append(getattr(error, "cause", None) or error)  # as Ray wraps it
    if full := [error for error in failures if is_full(error)]:
        raise full[0]  # whoever asked says where and what to do (`failures.disk_full_as_error`)
    if failures:
        raise failure_of(failures, len(calls)) from failures[0]


def failure_of(failures: Sequence[Exception], count: int) -> DraftwellError:
    """What to tell of parts that failed, out of so many."""
    first = failures[0]
    reason = str(first).strip().splitlines()[0] if str(first).strip() else type(first).__name__
    if isinstance(first, DraftwellError) and count == len(failures):
        # not its own class: a worker's `ForeignTrace` is no reason to begin a trace again
        return DraftwellError(reason)
    return DraftwellError(
        f"{len(failures)} of {count} parts failed, the first with: {reason}; run the same command "
        "again, it resumes with what is missing",
        code="workers_failed",
    )


@contextmanager
def on_threads(pool: WorkerPool) -> Iterator[Begin]:
    """Workers are threads of this process; stopped, they begin no further part."""
    threads = pool.threads or 1
    with using_threads(threads), ThreadPoolExecutor(pool.workers) as executor:

        def begin(what: str, job: Path, call: Call) -> Future[Any]:
            return executor.submit(worker_jobs.WORK[what], job, threads, **call)

        try:
            yield begin
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


@contextmanager
def on_ray(pool: WorkerPool) -> Iterator[Begin]:
    """Workers are processes of the Ray cluster of `$RAY_ADDRESS`, or of one on this machine for as
    long as the step runs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no tool of the house reports home
    local = {"num_cpus": pool.workers * pool.threads} if pool.threads else {}
    where = {} if os.environ.get("RAY_ADDRESS") else {**local, "include_dashboard": False}
    if where:  # before Ray is imported; of 2.52 to 2.58 nobody else asks for a token
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray  # an extra

    ray.init(log_to_driver=False, **where)
    try:
        cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        threads = pool.threads or share_of(cores, pool.workers)
        options = {"num_cpus": threads, "max_retries": LIVES}
        gpus = {} if pool.device == "cpu" else {"num_gpus": 1}

        def begin(what: str, job: Path, call: Call) -> Future[Any]:
            work = ray.remote(worker_jobs.WORK[what]).options(name=what, **options, **gpus)
            part: Future[Any] = work.remote(job, threads, **call).future()
            return part

        yield begin
    finally:
        ray.shutdown()


def share_of(cores: Sequence[float], workers: int) -> int:
    """The cores of each worker, all of them on one machine.

    Args:
        cores: of each machine of a cluster.

    >>> share_of([64, 64], 4), share_of([8, 2], 1), share_of([2], 4)
    (32, 8, 1)
    """
    return max(1, int(min(sum(cores) // workers, max(cores))))
