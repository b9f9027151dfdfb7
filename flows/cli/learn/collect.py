"""`draftwell step collect`: traces of the texts that target and draft write. The command has one
parameter for each flag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BeforeValidator, Field

from draftwell.components.collect.settings import CollectionSettings
from draftwell.flows.cli.engine_options import at_address, on_other_engine
from draftwell.flows.cli.learn.shared import (
    COLLECTED,
    Column,
    Redact,
    Source,
    Split,
    load,
    open_with_progress,
    worker_pool,
)
from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    EngineOption,
    Limit,
    MaxTokens,
    Pair,
    Runner,
    RunnerOption,
    Seed,
    Temperature,
    Threads,
    Workers,
    read_counts,
    read_names,
    readable,
    say,
)
from draftwell.flows.cli.settings_option import add_command
from draftwell.flows.cli.shared_options import ADDRESS, with_options
from draftwell.flows.context import encoder_of
from draftwell.flows.workspace import Workspace

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.recording.trace import TraceSet

DEFAULTS = CollectionSettings()


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, with_options(collect, ADDRESS))


Turns = Annotated[
    int,
    Field(ge=0, description="Turns of a conversation that get texts; 0 takes all."),
]
TopP = Annotated[
    float,
    Field(
        ge=0.001,
        le=1.0,
        description="Sample from the smallest set of tokens with this probability.",
    ),
]
Rollout = Annotated[
    int,
    Field(
        ge=1,
        description="Draft tokens recorded after every position: the longest draft that a "
        "replay can try.",
    ),
]
Out = Annotated[Path | None, Field(description="Trace folder (default: the workspace's).")]
Fresh = Annotated[bool, Field(description="Replace a trace of other prompts or settings.")]
PrefixKinds = Annotated[
    tuple[str, ...],
    BeforeValidator(read_names),
    Field(description="Who writes the texts: target, draft or both; target is enough to choose."),
]
Method = Annotated[
    str | None,
    Field(
        description=(
            "With --engine vllm: how it speculates, such as ngram:k=5:n=3; default: what "
            "was tuned for it, else off."
        )
    ),
]
Logprobs = Annotated[
    int,
    Field(
        ge=0,
        le=20,
        description="With --engine vllm or a URL: likeliest tokens that are named at each "
        "position.",
    ),
]

AtOnce = Annotated[
    tuple[int, ...] | None,
    BeforeValidator(read_counts),
    Field(description="With --engine URL: requests at once. Default: 8."),
]


def collect(
    context: typer.Context,
    pair: Pair = "default",
    prompts: Source = None,
    limit: Limit = None,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    split: Split = "train",
    column: Column = None,
    redact: Redact = False,
    turns: Turns = DEFAULTS.turns,
    temperature: Temperature = DEFAULTS.temperature,
    top_p: TopP = DEFAULTS.top_p,
    rollout: Rollout = DEFAULTS.rollout,
    seed: Seed = DEFAULTS.seed,
    out: Out = None,
    fresh: Fresh = False,
    prefix_kinds: PrefixKinds = DEFAULTS.prefix_kinds,
    runner: RunnerOption = Runner.threads,
    workers: Workers = 1,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: Threads = None,
    engine: EngineOption = "draftwell",
    method: Method = None,
    logprobs: Logprobs = 5,
    concurrency: AtOnce = None,
) -> None:
    """Collect traces: texts of the target and the draft, with what both models say at every
    position; of another engine, texts with the likeliest tokens.

    A run that was stopped resumes. Of the shipped prompts it takes the first 64.

    Example: draftwell step collect --pair default --prompts traffic.jsonl --set limit=60
    """
    count = limit or (None if prompts else COLLECTED)
    rows = load(prompts, count, split=split, column=column, redact=redact)
    if on_other_engine(context):
        return collect_on_other(context, rows)
    from draftwell.flows.steps import collect as collect_step

    settings = CollectionSettings(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        rollout=rollout,
        turns=turns,
        seed=seed,
        prefix_kinds=prefix_kinds,
    )
    space = Workspace(pair, dtype, say)
    rows = readable(encoder_of(space), rows, prompts)
    load_with = collect_step.loading(space, rows, settings)
    pool = worker_pool(runner, workers, threads, device)
    with open_with_progress("collect", pair, dtype, device, threads, **load_with) as opened:
        traces = collect_step.run_collect(
            opened, rows, settings, folder=out, fresh=fresh, pool=pool
        )
    tell(traces)


def collect_on_other(context: typer.Context, rows: Sequence[Prompt]) -> None:
    """Texts of another engine."""
    if at_address(context):
        from draftwell.flows.cli.remote import collect_remote

        return collect_remote(context, rows)
    from draftwell.flows.cli.engine import collect_elsewhere

    return collect_elsewhere(context, rows)


def tell(traces: TraceSet) -> None:
    """What was collected, and how many prompts lost how many tokens."""
    from draftwell.components.collect.collect import cuts

    cut, tokens = cuts(traces)
    digest, positions = traces.digest()[:12], traces.read(["position"]).num_rows
    typer.echo(f"{traces.folder}  {positions} positions  digest {digest}")
    if cut:
        typer.echo(f"{cut} of the prompts were too long and were cut, by {tokens} tokens in all")
