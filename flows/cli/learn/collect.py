"""`draftwell step collect`: traces of the texts that target and draft write. The command has one
parameter for each flag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    read_concurrency,
    readable,
    say,
)
from draftwell.flows.cli.shared_options import ADDRESS, with_options
from draftwell.flows.context import encoder_of
from draftwell.flows.workspace import Workspace

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.recording.trace import TraceSet

DEFAULTS = CollectionSettings()
PREFIX_KINDS = ",".join(DEFAULTS.prefix_kinds)


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(with_options(collect, ADDRESS))


Turns = Annotated[
    int,
    typer.Option("--turns", min=0, help="Turns of a conversation that get texts; 0 takes all."),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0.001,
        max=1.0,
        help="Sample from the smallest set of tokens with this probability.",
    ),
]
Rollout = Annotated[
    int,
    typer.Option(
        "--rollout",
        min=1,
        help="Draft tokens recorded after every position: the longest draft that a replay can try.",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="Trace folder (default: the workspace's).")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Replace a trace of other prompts or settings.")
]
Kinds = Annotated[
    str,
    typer.Option(
        "--kinds",
        help="Who writes the texts, comma-separated; `target` alone is enough to tune.",
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        help=(
            "With --engine vllm: how it speculates, such as ngram:k=5:n=3; default: what "
            "was tuned for it, else off."
        ),
    ),
]
Logprobs = Annotated[
    int,
    typer.Option(
        "--logprobs",
        min=0,
        max=20,
        help="With --engine vllm or a URL: likeliest tokens that are named at each position.",
    ),
]

AtOnce = Annotated[
    Any,
    typer.Option(
        "--concurrency",
        parser=read_concurrency,
        metavar="NUMBER",
        help="With --engine URL: requests at once. Default: 8.",
    ),
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
    kinds: Kinds = PREFIX_KINDS,
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
    position. With --engine vllm or a URL, texts are collected instead, one JSON object a line,
    with the likeliest tokens and the acceptance of drafts.

    A run that was stopped resumes. Of the shipped prompts it takes the first 64.

    Example: draftwell step collect --pair default --prompts traffic.jsonl --limit 60
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
        prefix_kinds=tuple(kind.strip() for kind in kinds.split(",") if kind.strip()),
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
