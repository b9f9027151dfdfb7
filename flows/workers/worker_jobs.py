"""What a worker does of a pipeline step that is spread out: write one shard, or replay some
configurations.

A *job* is a folder with everything about the step except which part to do: `job.json`, and the
artifacts that replays need. The worker may be a thread of this process or a process on another
machine, so it is handed names, numbers and paths only.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter

from draftwell.components.collect.collect import collect_shard
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay.sampled import texts_of
from draftwell.components.tune.search.search import Search, trials_in
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.artifacts.pair_files import draftwell_home, models_root
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources

if TYPE_CHECKING:
    from draftwell.flows.context import StepContext
    from draftwell.serving.runtime.pair import LoadedPair

JOB = "job.json"
_pairs: dict[Path, SimpleQueue[LoadedPair]] = {}
"""Job → loaded pairs that no worker of this process uses now. A pair's slots serve one engine at a
time."""


def describe_collection(
    job: Path,
    step: StepContext,
    prompts: Sequence[Prompt],
    traces: Path,
    settings: CollectionSettings,
) -> None:
    """Write the job of a collection.

    Args:
        traces: folder of the trace, which the driver holds.
    """
    pair = step.pair
    target: Any = pair.models["target"]
    name = Path(step.workspace.name)
    write_json(
        job / JOB,
        {
            "pair": str(name.absolute()) if name.is_file() else str(name),
            "home": str(draftwell_home()),
            "models": str(models_root()),
            "dtype": pair.dtype,
            "device": pair.device,
            "slots": target.slots.count,
            "max_context": target.max_context,
            "traces": str(traces.absolute()),
            "settings": settings.model_dump(mode="json"),
            "prompts": [asdict(prompt) for prompt in prompts],
        },
    )


def write_shard(job: Path, threads: int, index: int) -> str:
    """Write a shard of a collection; returns its path."""
    fields = read_job(job)
    torch.set_num_threads(threads)
    with one_of(job, fields) as pair:
        return str(
            collect_shard(
                pair,
                TypeAdapter(list[Prompt]).validate_python(fields["prompts"]),
                Path(fields["traces"]),
                index,
                CollectionSettings(**fields["settings"]),
            )
        )


def describe_search(job: Path, search: Search, traces: Path, fingerprint: str) -> None:
    """Write the job of a search, with its artifacts."""
    for kind, artifact in search.resources.artifacts.items():
        # saving notes a digest, and the original keeps that of where it comes from
        copy.copy(artifact).save(job / "artifacts" / kind)
    copy.copy(search.profile).save(job / "profile")
    write_json(
        job / JOB,
        {
            "traces": str(traces.absolute()),
            "trace_digest": search.trace_digest,
            "fingerprint": fingerprint,
            "artifacts": list(search.resources.artifacts),
            "special_tokens": sorted(search.resources.special_tokens),
            "deterministic": search.resources.deterministic,
            "max_tokens": search.max_tokens,
        },
    )


def replay_configs(
    job: Path, threads: int, choices: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Replay some configurations, as a search in one process does it; returns the trials as JSON.

    Args:
        choices: each as `StrategyChoice.to_json`.
    Raises:
        DraftwellError: this worker does not see the trace that the search is about.
    """
    fields = read_job(job)
    torch.set_num_threads(threads)
    traces = TraceSet(Path(fields["traces"]), fingerprint=fields["fingerprint"])
    if traces.digest() != fields["trace_digest"]:
        raise DraftwellError(
            f"{traces.folder} holds another trace on this worker than on the driver: every worker "
            "must see the same files",
            code="other_trace_on_worker",
        )
    resources = StrategyResources(
        {
            kind: KINDS[kind].load_class().load(job / "artifacts" / kind)
            for kind in fields["artifacts"]
        },
        frozenset(fields["special_tokens"]),
        fields["deterministic"],
    )
    search = Search(
        texts_of(traces),
        resources,
        HardwareProfile.load(job / "profile"),
        fields["max_tokens"],
        trials_in(None),
        fields["trace_digest"],
    )
    return [
        search.predict(StrategyChoice.from_json(choice)).model_dump(mode="json", exclude_unset=True)
        for choice in choices
    ]


@contextmanager
def loaded(job: Path, own: LoadedPair, count: int) -> Iterator[None]:
    """Keep `count` pairs for workers that are threads of this process: `own`, and others that are
    loaded now.

    They are loaded one after the other, before any of them computes: transformers changes torch's
    default dtype for the whole process while it loads.
    """
    fields = read_job(job)
    pairs: SimpleQueue[LoadedPair] = SimpleQueue()
    for pair in (own, *(load(fields) for _ in range(count - 1))):
        pairs.put(pair)
    _pairs[job] = pairs
    try:
        yield
    finally:
        del _pairs[job]


@contextmanager
def one_of(job: Path, fields: Mapping[str, Any]) -> Iterator[LoadedPair]:
    """A loaded pair that no other worker uses meanwhile. A worker process loads it with its first
    shard and keeps it for the next."""
    if job not in _pairs:
        _pairs.clear()
        pairs: SimpleQueue[LoadedPair] = SimpleQueue()
        pairs.put(load(fields))
        _pairs[job] = pairs
    pairs = _pairs[job]
    pair = pairs.get()
    try:
        yield pair
    finally:
        pairs.put(pair)


def load(fields: Mapping[str, Any]) -> LoadedPair:
    """The pair of a job, as the driver loaded it. A worker on another machine may keep models in
    another folder."""
    folders = (
        ("DRAFTWELL_HOME", fields["home"], draftwell_home()),
        ("DRAFTWELL_MODELS", fields["models"], models_root()),
    )
    for variable, folder, here in folders:
        if str(here) != folder:
            os.environ.setdefault(variable, folder)
    # A collection runs target and draft only, which is what this strategy needs: no qualifier and
    # no draft in ONNX Runtime.
    return Workspace(fields["pair"], fields["dtype"]).load(
        strategies=(StrategyChoice("vanilla_sd"),),
        slots=fields["slots"],
        device=fields["device"],
        max_context=fields["max_context"],
    )


def read_job(job: Path) -> dict[str, Any]:
    """Read `job.json`.

    Raises:
        DraftwellError: it is not there.
    """
    try:
        fields: dict[str, Any] = json.loads((job / JOB).read_text())
    except FileNotFoundError:
        raise DraftwellError(
            f"this worker does not see {job}: DRAFTWELL_HOME must be on a file system that all "
            "workers share, under the same path",
            code="job_not_found",
        ) from None
    return fields


WORK: dict[str, Callable[..., Any]] = {
    "write a shard": write_shard,
    "replay configurations": replay_configs,
}
"""Name of a work → what does it, with a job, the threads of this worker, and the part."""
