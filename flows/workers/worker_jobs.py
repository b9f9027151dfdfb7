"""What a worker does of a step that is spread over workers: write one shard, or replay one strategy's configs.

A *job* is a folder that describes the step but not which part is meant: `job.json`, and the artifacts that replays need. The
worker may be a thread of this process or a process on another machine, so it is handed names, numbers and paths only. Plain
functions: `task_runners` makes Prefect tasks of them.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from serving.artifacts.pair_files import draftwell_home, models_root
from serving.errors import DraftwellError
from serving.files import write_atomically

if TYPE_CHECKING:
    from components.prompts.prompt import Prompt
    from components.tune.search.search import Search
    from flows.context import StepContext
    from serving.runtime.pair import LoadedPair

JOB = "job.json"
_pairs: dict[Path, SimpleQueue[LoadedPair]] = {}
"""Job → loaded pairs that no worker of this process is computing with. A pair's slots serve one engine at a time."""


def describe_collection(job: Path, step: StepContext, prompts: Sequence[Prompt], traces: Path, settings: Mapping[str, Any],
                        threads: int) -> None:
    """Write the job of a collection.

    Args:
        traces: folder of the trace, which the driver holds.
        settings: of `components.collect.collect.work_of`.
        threads: that every worker's torch computes with.
    """
    pair = step.pair
    target: Any = pair.models["target"]
    name = Path(step.workspace.name)
    write_job(
        job,
        {
            "pair": str(name.absolute()) if name.is_file() else str(name),
            "home": str(draftwell_home()),
            "models": str(models_root()),
            "dtype": pair.dtype,
            "device": pair.device,
            "slots": target.slots.count,
            "max_context": target.max_context,
            "threads": threads,
            "traces": str(traces.absolute()),
            "settings": dict(settings),
            "prompts": [asdict(prompt) for prompt in prompts],
        },
    )


def write_shard(job: Path, index: int) -> str:
    """Write a shard of a collection; returns its path."""
    import torch

    from components.collect.collect import collect_shard

    work = read_job(job)
    torch.set_num_threads(work["threads"])
    with one_of(job, work) as pair:
        return str(collect_shard(pair, prompts_of(work), Path(work["traces"]), index, **work["settings"]))


def describe_search(job: Path, search: Search, traces: Path, fingerprint: str, threads: int) -> None:
    """Write the job of a search, with its artifacts."""
    for kind, artifact in search.kit.artifacts.items():
        copy.copy(artifact).save(job / "artifacts" / kind)  # saving notes a digest, and the original keeps that of where it comes from
    copy.copy(search.profile).save(job / "profile")
    write_job(job, {"traces": str(traces.absolute()), "trace_digest": search.trace_digest, "fingerprint": fingerprint, "threads": threads,
                "artifacts": list(search.kit.artifacts), "special_tokens": sorted(search.kit.special_tokens),
                "deterministic": search.kit.deterministic, "max_tokens": search.max_tokens, "overlap": search.overlap,
                "seed": search.studies.seed})


def replay_strategy(job: Path, name: str, share: int) -> list[dict[str, Any]]:
    """Try `share` configs of a strategy by replay, the same ones that a search in one process tries; returns the trials as JSON.

    Raises:
        DraftwellError: this worker does not see the trace that the search is about.
    """
    import torch

    from components.replay.texts import read_texts
    from components.tune.search.search import Search
    from components.tune.search.studies import Studies
    from serving.artifacts.hardware_profile import HardwareProfile
    from serving.artifacts.kinds import KINDS
    from serving.recording.trace import TraceSet
    from serving.runtime.strategies import StrategyResources

    work = read_job(job)
    torch.set_num_threads(work["threads"])
    traces = TraceSet(Path(work["traces"]), fingerprint=work["fingerprint"])
    if traces.digest() != work["trace_digest"]:
        raise DraftwellError(f"{traces.folder} holds another trace here than where the tuning runs: every worker "
                             f"must see the same files", code="foreign_trace")
    kit = StrategyResources(
        {kind: KINDS[kind].load_class().load(job / "artifacts" / kind) for kind in work["artifacts"]},
        frozenset(work["special_tokens"]),
        work["deterministic"],
    )
    texts, profile = read_texts(traces), HardwareProfile.load(job / "profile")
    search = Search(texts, kit, profile, work["max_tokens"], work["overlap"], Studies(None, work["seed"]), work["trace_digest"])
    return [vars(trial) for trial in search.search(name, share, search.predict)]


@contextmanager
def loaded(job: Path, own: LoadedPair, count: int) -> Iterator[None]:
    """Keep `count` pairs for workers that are threads of this process: `own`, and others that are loaded now.

    They are loaded one after the other, before anybody computes: while transformers loads, torch's default dtype is another one
    for the whole process.
    """
    work = read_job(job)
    pairs: SimpleQueue[LoadedPair] = SimpleQueue()
    for pair in (own, *(load(work) for _ in range(count - 1))):
        pairs.put(pair)
    _pairs[job] = pairs
    try:
        yield
    finally:
        del _pairs[job]


@contextmanager
def one_of(job: Path, work: Mapping[str, Any]) -> Iterator[LoadedPair]:
    """A loaded pair for a worker alone. A process that was started to work loads it with its first shard and keeps it for the next."""
    if job not in _pairs:
        _pairs.clear()
        pairs: SimpleQueue[LoadedPair] = SimpleQueue()
        pairs.put(load(work))
        _pairs[job] = pairs
    pairs = _pairs[job]
    pair = pairs.get()
    try:
        yield pair
    finally:
        pairs.put(pair)


def load(work: Mapping[str, Any]) -> LoadedPair:
    """The pair of a job, as the driver loaded it. A worker on another machine may keep models in a place of its own."""
    from flows.workspace import Workspace

    for variable, place, here in (("DRAFTWELL_HOME", work["home"], draftwell_home()), ("DRAFTWELL_MODELS", work["models"], models_root())):
        if str(here) != place:
            os.environ.setdefault(variable, place)
    # Collecting runs target and draft alone: a strategy is named that needs no qualifier and no draft in ONNX Runtime.
    return Workspace(work["pair"], work["dtype"]).load(slots=work["slots"], device=work["device"], max_context=work["max_context"],
                                                       strategies=("vanilla_sd",))


def prompts_of(work: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a job."""
    from components.prompts.prompt import Prompt

    return [Prompt(**{**row, "messages": tuple(row["messages"]), "answers": tuple(row["answers"])}) for row in work["prompts"]]


def write_job(job: Path, work: Mapping[str, Any]) -> None:
    """Write `job.json`."""
    write_atomically(job / JOB, json.dumps(work).encode())


def read_job(job: Path) -> dict[str, Any]:
    """Read `job.json`.

    Raises:
        DraftwellError: it is not there.
    """
    try:
        work: dict[str, Any] = json.loads((job / JOB).read_text())
    except FileNotFoundError:
        raise DraftwellError(f"{job} is not visible here: DRAFTWELL_HOME must be on a file system that all workers share, under the "
                             "same path", code="job_not_found") from None
    return work
