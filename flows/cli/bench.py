"""`draftwell bench`: strategies, and peers where asked for, on the same prompts in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from draftwell.components.bench.settings import DEFAULTS
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.flows.cli.engine_options import at_address, on_other_engine, take_one_level
from draftwell.flows.cli.options import (
    Artifacts,
    DeviceOption,
    DraftDevice,
    DtypeOption,
    EngineOption,
    Limit,
    MaxTokens,
    PadTarget,
    Pair,
    PlainOption,
    Prompts,
    Seed,
    Temperature,
    Threads,
    prompts_from,
    read_concurrency,
)
from draftwell.flows.cli.shared_options import ADDRESS, with_options

Strategies = Annotated[
    str,
    typer.Option(
        "--strategies",
        help=(
            "Comma-separated: NAME, NAME:key=value:key=value to set parameters, "
            "NAME@1+1 to give each model its own share of the cores. "
            "Autoregressive decoding is always measured. With --engine vllm its "
            "methods, such as ngram:k=5:n=3."
        ),
    ),
]
Mix = Annotated[
    bool,
    typer.Option("--mix", help="Take prompts of every task in turn before --limit applies."),
]
MaxPromptTokens = Annotated[
    int | None,
    typer.Option(
        "--max-prompt-tokens",
        min=1,
        help="Leave out prompts of more tokens, chat template included.",
    ),
]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Interleaved runs; medians are reported.")]
PeerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        help="Also measure another library in the same run: transformers, vllm or llama.cpp "
        "(`make peers` installs the last "
        "two); may be repeated.",
    ),
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="strategy.key=value: a parameter of every config of that strategy; may be repeated.",
    ),
]
Concurrency = Annotated[
    Any,
    typer.Option(
        "--concurrency",
        parser=read_concurrency,
        metavar="NUMBERS",
        help="Measure throughput only: one request at a time, then this many at once. With "
        "--engine URL: at each of these numbers of requests at once, such as 1,8,32; default: 1.",
    ),
]
CheckCpu = Annotated[
    bool,
    typer.Option(
        "--check-cpu",
        help="Compare the outputs of a CUDA run with those of the CPU; exit code 1 if they differ.",
    ),
]
Exactness = Annotated[
    bool,
    typer.Option(
        "--exactness",
        help="Check instead that every lossless strategy's greedy answers are plain decoding's, to "
        "the bit: alone, three times in a row, as a stream reads it, beside seven others, as four "
        "choices, with a prediction, with prompts cut otherwise, in a second turn. Resumes where "
        "it was ended; exit code 1 if one differs.",
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Compare acceptance with that of a speculation_profile.json, or of the checkpoint "
        "that it belongs to.",
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")]
MarkdownFile = Annotated[
    Path | None, typer.Option("--markdown", help="Write the tables to this file, as Markdown.")
]
Plots = Annotated[
    Path | None, typer.Option("--plots", help="Write plots to this folder, as PNG files.")
]
"""Options that other engines know, too."""


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(with_options(bench, ADDRESS))


def bench(
    context: typer.Context,
    pair: Pair = "default",
    strategies: Strategies = "vanilla_sd",
    prompts: Prompts = None,
    limit: Limit = DEFAULTS.limit,
    mix: Mix = DEFAULTS.mix,
    max_prompt_tokens: MaxPromptTokens = DEFAULTS.max_prompt_tokens,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    temperature: Temperature = DEFAULTS.temperature,
    seed: Seed = DEFAULTS.seed,
    runs: Runs = DEFAULTS.runs,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    draft_device: DraftDevice = None,
    threads: Threads = DEFAULTS.threads,
    pad_target: PadTarget = None,
    peer: PeerOption = None,
    settings: SettingOption = None,
    artifacts: Artifacts = None,
    concurrency: Concurrency = None,
    check_cpu: CheckCpu = False,
    exactness: Exactness = False,
    profile: ProfileOption = None,
    out: JsonFile = None,
    markdown: MarkdownFile = None,
    plots: Plots = None,
    engine: EngineOption = "draftwell",
    plain: PlainOption = None,
) -> None:
    """Compare strategies on the same prompts, interleaved, and print one table.

    Example: draftwell bench --strategies vanilla_sd,spide,sprinter:tau=0.9 --limit 8 --json
    report.json
    """
    if on_other_engine(context):
        rows = prompts_from(prompts) if prompts else demo_prompts()
        if at_address(context):
            from draftwell.flows.cli.remote import bench_remote

            return bench_remote(context, rows)
        from draftwell.flows.cli.engine import bench_elsewhere

        take_one_level(context)
        return bench_elsewhere(context, rows)
    from draftwell.flows.cli.bench_run import bench_pair

    take_one_level(context)
    bench_pair(context)
