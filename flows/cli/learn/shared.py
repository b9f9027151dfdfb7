"""What the commands that learn from data share: collect, train, calibrate, tune."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from draftwell.components.prompts.prompt import demo_prompts
from draftwell.flows.cli.options import (
    Runner,
    pick_device,
    progress,
    prompts_from,
    say,
    set_threads,
)
from draftwell.flows.context import pictures_of
from draftwell.flows.loading import open_pair
from draftwell.flows.workspace import in_turn
from draftwell.registry.store import Store
from draftwell.serving.device import default_device

if TYPE_CHECKING:
    from draftwell.components.prompts.overlap import TrainingPrompts
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.context import StepContext
    from draftwell.flows.workers.task_runners import WorkerPool

SOURCES = (
    "JSONL, JSON, Parquet, Arrow, CSV, text or a folder of these: requests and logs of OpenAI's "
    "API, vLLM, LiteLLM and Langfuse, ShareGPT, Alpaca, or plain prompts; a saved data set; "
    "ORG/NAME on the Hugging Face hub"
)
Source = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE|HUB",
        help="Requests, logs or a data set. Default: shipped ones.",
    ),
]
Split = Annotated[str, Field(description="Split of a data set.")]
Column = Annotated[str | None, Field(description="Column of a data set that holds the prompts.")]
Redact = Annotated[
    bool,
    Field(description="Mask e-mails, phone numbers, keys, cards and addresses in the prompts."),
]
Traces = Annotated[Path | None, Field(description="Trace folder (default: the workspace's).")]
Publish = Annotated[bool, Field(description="Also register what was made in MLflow.")]


COLLECTED = 64
"""Shipped prompts that `collect` takes without a limit: the others are left to calibrate, tune and
gate on."""


@contextmanager
def open_with_progress(
    title: str, pair: str, dtype: str | None, device: str | None, threads: int | None, **load: Any
) -> Iterator[StepContext]:
    """A loaded pair with a progress bar; the keyword arguments are those of `open_pair`."""

    set_threads(threads)
    opened = open_pair(
        pair, dtype, device=pick_device(device), say=say, **{"any_strategy": False, **load}
    )
    with progress(title) as bar:
        yield type(opened)(opened.workspace, opened.pair, bar)


def load(source: str | None, limit: int | None, **options: Any) -> list[Prompt]:
    """Prompts of any source, or the shipped ones; `options` are those of `load_prompts`."""

    return prompts_from(source, limit, **options) if source else demo_prompts(limit)


def load_more(
    source: str | None, limit: int | None, used: TrainingPrompts, **options: Any
) -> list[Prompt]:
    """Prompts of which `limit` remain when those that something was made from are left out, as far
    as the source has so many."""
    more = None if source is None or limit is None else limit + len(used.hashes)
    return load(source, more, **options)


@in_turn("draftwell step train")
def publish_kinds(opened: StepContext, *kinds: str) -> None:
    """Register artifacts of the workspace."""

    store, space = Store(), opened.workspace
    for kind in kinds:
        made = store.publish(
            space.folder(kind), pair=space.spec.name, plots=pictures_of(space, kind)
        )
        say(f"registered {made.name} version {made.version}")


def worker_pool(
    runner: Runner, workers: int, threads: int | None, device: str | None
) -> WorkerPool | None:
    """How shards and replays are spread over workers, None where this process does all."""
    from draftwell.flows.workers.task_runners import worker_pool_for

    return worker_pool_for(
        runner.value, workers, threads=threads, device=device or default_device()
    )
