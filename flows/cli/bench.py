"""`draftwell bench`: strategies, and peers where asked for, on the same prompts in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import BeforeValidator, Field

from draftwell.components.bench.settings import DEFAULTS
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.flows.cli.engine_options import at_address, on_other_engine, take_one_level
from draftwell.flows.cli.options import (
    Artifacts,
    DeviceOption,
    DraftDevice,
    DtypeOption,
    EngineOption,
    MaxTokens,
    PadTarget,
    Pair,
    PlainOption,
    Prompts,
    Seed,
    Temperature,
    Threads,
    prompts_from,
    read_counts,
    read_names,
)
from draftwell.flows.cli.settings_option import OtherKeys, add_command
from draftwell.flows.cli.shared_options import ADDRESS, with_options

Strategies = Annotated[
    str,
    typer.Option(
        "--strategies",
        metavar="NAMES",
        help=("With commas: NAME, NAME:KEY=VALUE, NAME@1+1."),
    ),
]
Mix = Annotated[
    bool,
    Field(description="Take prompts of every task in turn before the limit applies."),
]
MaxPromptTokens = Annotated[
    int | None,
    Field(ge=1, description="Leave out prompts of more tokens, chat template included."),
]
Runs = Annotated[int, Field(ge=1, description="Interleaved runs; medians are reported.")]
Peers = Annotated[
    tuple[str, ...],
    BeforeValidator(read_names),
    Field(
        description="Also measure these libraries in the same run: transformers, or some that "
        "`make peers` installs: vllm, llama.cpp, openvino, xllamacpp, onnxruntime."
    ),
]
Concurrency = Annotated[
    tuple[int, ...] | None,
    BeforeValidator(read_counts),
    Field(
        description=(
            "Measure throughput only: one request at a time, then this many at once; with several "
            "numbers, such as 1,8,32, or peers, at each of these. With --engine URL: at each of "
            "these; default: 1."
        )
    ),
]
CheckCpu = Annotated[
    bool,
    Field(
        description="Compare the outputs of a CUDA run with those of the CPU; exit code 1 if "
        "they differ."
    ),
]
Exactness = Annotated[
    bool,
    Field(
        description=(
            "Check instead that every lossless strategy's greedy answers are plain decoding's, to "
            "the bit: alone, three times in a row, as a stream reads it, beside seven others, "
            "as four "
            "choices, with a prediction, with prompts cut otherwise, in a second turn. Resumes "
            "where "
            "it was ended; exit code 1 if one differs."
        )
    ),
]
ProfileOption = Annotated[
    Path | None,
    Field(
        description=(
            "Compare acceptance with that of a speculation_profile.json, or of the checkpoint "
            "that it belongs to."
        )
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", min=1, max=10**9, help="Use the first N prompts."),
]
Out = Annotated[
    list[Path] | None,
    typer.Option(
        "--out", metavar="PATH", help="FILE.json, FILE.md or FOLDER of plots; repeatable."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Parameters = Annotated[dict[str, str], OtherKeys()]


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, with_options(bench, ADDRESS), file=True)


def bench(
    context: typer.Context,
    pair: Pair = "default",
    strategies: Strategies = "vanilla_sd",
    prompts: Prompts = None,
    limit: Limit = None,
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
    peers: Peers = (),
    parameters: Parameters = {},  # noqa: B006 (never changed)
    artifacts: Artifacts = None,
    concurrency: Concurrency = None,
    check_cpu: CheckCpu = False,
    exactness: Exactness = False,
    profile: ProfileOption = None,
    out: Out = None,
    as_json: AsJson = False,
    engine: EngineOption = "draftwell",
    plain: PlainOption = None,
) -> None:
    """Compare strategies on the same prompts, interleaved, and print one table.

    Example: draftwell bench --strategies vanilla_sd,sprinter:tau=0.9 --limit 8 --out report.json
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

    bench_pair(context)
