"""Spreading a step over workers: its jobs as Prefect tasks, on threads of this process or on a Ray
cluster.

Collection is spread by shard, the replays of tuning in parts of equal size. The result is that of a
run without workers: the same trace, row by row, and the same trials. What is *measured* is never
spread: tuning's rungs, gates and benches are timings, and a timing taken on another machine, or
next to other work on this one, would let the wrong config win. They stay here, one at a time.

Workers read and write files: on a cluster every machine needs the same version of Draftwell, the
same kind of processor, and `$DRAFTWELL_HOME` on a file system that all share, under the same path.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.flows.failures import is_full, reaching_prefect, worth_retrying
from draftwell.flows.workers import worker_jobs
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from prefect import Task
    from prefect.task_runners import TaskRunner

    from draftwell.components.collect.collect import Spread as ShardSpread
    from draftwell.components.collect.settings import CollectionSettings
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.evidence import Trial
    from draftwell.components.tune.search.search import Search
    from draftwell.components.tune.search.search import Spread as ReplaySpread
    from draftwell.flows.context import StepContext
    from draftwell.serving.runtime.strategies import StrategyChoice

Call = dict[str, Any]
"""What says which part of a job is meant, as JSON."""

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
        threads: that each worker's torch computes with.
        device: cpu or cuda, of the models.
    """

    runner: str
    workers: int
    threads: int
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
    if runner == "threads" and workers == 1:
        return None
    if runner == "threads" and device != "cpu":
        raise DraftwellError(
            (
                "several workers on threads would wait for one GPU: use --workers 1, or "
                "--runner ray with a GPU for each"
            ),
            code="threads_share_gpu",
        )
    if runner == "ray":
        need_ray()
    from draftwell.serving.device import default_threads

    return WorkerPool(runner, workers, max(1, (threads or default_threads()) // workers), device)


def need_ray() -> None:
    """Refuse to continue without Ray."""
    try:
        import prefect_ray  # noqa: F401
    except ImportError as error:
        raise DraftwellError(
            "--runner ray needs the package prefect-ray: pip install -c constraints.txt "
            "'draftwell[ray]'",
            code="ray_missing",
        ) from error


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
            worker_jobs.describe_collection(job, step, prompts, traces, settings, pool.threads)
            here = pool.runner == "threads"
            with (
                worker_jobs.loaded(job, step.pair, min(pool.workers, len(missing)))
                if here
                else nullcontext()
            ):
                run(
                    pool,
                    "write a shard",
                    job,
                    [{"index": index} for index in missing],
                    lambda call, _: found(call["index"]),
                )

    return spread


def spread_replays(pool: WorkerPool, step: StepContext, traces: Path) -> ReplaySpread:
    """What has the replays of a tuning made by workers, a part each; `traces` is the trace's
    folder."""

    def spread(
        search: Search, choices: Sequence[StrategyChoice], found: Callable[[Trial], None]
    ) -> None:
        from draftwell.components.tune.evidence import Trial

        parts = min(len(choices), PARTS * pool.workers)
        calls = [
            {"choices": [choice.to_json() for choice in choices[part::parts]]}
            for part in range(parts)
        ]

        def keep(call: Call, made: Sequence[Mapping[str, Any]]) -> None:
            for trial in made:
                found(Trial.model_validate(trial))

        with job_folder(step) as job:
            worker_jobs.describe_search(job, search, traces, step.pair.fingerprint, pool.threads)
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
    """Run one of `WORK` once for each call, as tasks of a Prefect flow.

    A part that fails does not stop the others, so that a second run has less to do.

    Args:
        done: called here with each part's call and result, in the order of `calls`.
    Raises:
        DraftwellError: what the parts that failed raised, or what became of them.
    """
    from prefect import Flow

    from draftwell.components.report.machine import using_threads

    flow = Flow(
        spread_out,
        name=f"{what} on {pool.runner}",
        task_runner=runner_of(pool),
        result_serializer="json",
        validate_parameters=False,
    )
    token = _now.set((pool, done))
    try:
        with using_threads(pool.threads if pool.runner == "threads" else None), reaching_prefect():
            flow(what, str(job), list(calls))
    finally:
        _now.reset(token)


_now: ContextVar[tuple[WorkerPool, Callable[[Call, Any], None]]] = ContextVar(
    "the pool, and the callback for each part"
)


def spread_out(what: str, job: str, calls: list[Call]) -> None:
    """The flow. Prefect sends it to Ray's workers by value, with all that it names: a name and
    nothing else."""
    _hand_out(what, job, calls)


def _hand_out(what: str, job: str, calls: list[Call]) -> None:
    pool, done = _now.get()
    task, failures = as_task(what), list[Exception]()
    with ray_options(pool) if pool.runner == "ray" else nullcontext():
        futures = [task.submit(job, **call) for call in calls]
    for call, future in zip(calls, futures, strict=True):
        try:
            done(call, future.result())
        except Exception as error:
            failures.append(error)
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
        f"{len(failures)} of {count} parts failed, the first with: {reason}; run the same "
        "command again, it resumes with "
        "what is missing",
        code="workers_failed",
    )


def _write_shard(job: str, index: int) -> str:
    return worker_jobs.write_shard(Path(job), index)


def _replay_configs(job: str, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return worker_jobs.replay_configs(Path(job), choices)


WORK: dict[str, Callable[..., Any]] = {
    "write a shard": _write_shard,
    "replay configurations": _replay_configs,
}
"""Name of a task → what it does. Functions of this module, which workers import rather than
receive."""


def as_task(what: str) -> Task[..., Any]:
    """A task that runs each time; what may be well then (`failures.worth_retrying`) is tried once
    more."""
    from prefect import Task
    from prefect.cache_policies import NO_CACHE

    return Task(
        WORK[what],
        name=what,
        retries=1,
        retry_delay_seconds=1,
        retry_condition_fn=worth_retrying,
        cache_policy=NO_CACHE,
        result_serializer="json",
    )


def runner_of(pool: WorkerPool) -> TaskRunner[Any]:
    """Prefect's task runner: threads, the Ray cluster of `$RAY_ADDRESS`, or one on this machine for
    as long as the flow runs."""
    if pool.runner == "threads":
        from prefect.task_runners import ThreadPoolTaskRunner

        return ThreadPoolTaskRunner(max_workers=pool.workers)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no tool of the house reports home
    from prefect_ray import RayTaskRunner

    address = os.environ.get("RAY_ADDRESS")
    if address:
        return RayTaskRunner(address=address)
    return RayTaskRunner(
        init_kwargs={
            "num_cpus": pool.workers * pool.threads,
            "include_dashboard": False,
            "log_to_driver": False,
        }
    )


def ray_options(pool: WorkerPool) -> AbstractContextManager[Any]:
    """What a part takes of a machine, and how often it is begun again if its worker dies."""
    from prefect_ray.context import remote_options

    options: dict[str, Any] = {"num_cpus": pool.threads, "max_retries": LIVES}
    if pool.device != "cpu":
        options["num_gpus"] = 1
    context: AbstractContextManager[Any] = remote_options(**options)
    return context
