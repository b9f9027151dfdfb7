"""`draftwell bench`: strategies, and peers where asked for, on the same prompts in one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwell.components.bench.peers import check_peers
from draftwell.components.bench.settings import DEFAULTS, BenchSettings
from draftwell.flows.cli.options import (
    Artifacts,
    DeviceOption,
    DraftDevice,
    DtypeOption,
    EngineName,
    EngineOption,
    Limit,
    MaxTokens,
    PadTarget,
    Pair,
    Prompts,
    Seed,
    Temperature,
    Threads,
    check_artifacts,
    check_folder,
    check_output,
    pick_device,
    pick_draft_device,
    progress,
    say,
    set_threads,
    wide_console,
    write_json,
)
from draftwell.flows.settings import quality_floor
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.bench.schema import BenchReport
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.runtime.pair import LoadedPair
    from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources

Wanted = list[tuple[str, dict[str, str]]]


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(bench)


def bench(
    context: typer.Context,
    pair: Pair = "default",
    strategies: Annotated[
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
    ] = "vanilla_sd",
    prompts: Prompts = None,
    limit: Limit = DEFAULTS.limit,
    mix: Annotated[
        bool,
        typer.Option("--mix", help="Take prompts of every task in turn before --limit applies."),
    ] = DEFAULTS.mix,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-prompt-tokens",
            min=1,
            help="Leave out prompts of more tokens, chat template included.",
        ),
    ] = DEFAULTS.max_prompt_tokens,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    temperature: Temperature = DEFAULTS.temperature,
    seed: Seed = DEFAULTS.seed,
    runs: Annotated[
        int, typer.Option("--runs", min=1, help="Interleaved runs; medians are reported.")
    ] = DEFAULTS.runs,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    draft_device: DraftDevice = None,
    threads: Threads = DEFAULTS.threads,
    pad_target: PadTarget = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help="Also measure another library in the same run: transformers, vllm or llama.cpp "
            "(`make peers` installs the last "
            "two); may be repeated.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help=(
                "strategy.key=value: a parameter of every config of that strategy; may be repeated."
            ),
        ),
    ] = None,
    artifacts: Artifacts = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            min=2,
            help="Measure throughput only: one request at a time, then this many at once.",
        ),
    ] = None,
    check_cpu: Annotated[
        bool,
        typer.Option(
            "--check-cpu",
            help=(
                "Compare the outputs of a CUDA run with those of the CPU; exit code 1 if they "
                "differ."
            ),
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables to this file, as Markdown.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Write plots to this folder, as PNG files.")
    ] = None,
    engine: EngineOption = EngineName.draftwell,
) -> None:
    """Compare strategies on the same prompts, interleaved, and print one table.

    Example: draftwell bench --strategies vanilla_sd,spide,sprinter:tau=0.9 --limit 8 --json
    report.json
    """
    from draftwell.flows.cli.engine import bench_elsewhere, named, refuse_options

    elsewhere = (
        "strategies",
        "prompts",
        "limit",
        "mix",
        "max_tokens",
        "temperature",
        "seed",
        "concurrency",
        "out",
    )
    if refuse_options(context, engine, elsewhere):
        return bench_elsewhere(
            pair,
            dtype,
            device,
            threads,
            rows=(read_rows(prompts), mix, limit),
            out=out,
            at_once=concurrency or 1,
            methods=strategies if named(context, "strategies") else None,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
    wanted = parse_wanted(strategies, settings or [])
    chosen = BenchSettings(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        runs=runs,
        limit=limit,
        mix=mix,
        max_prompt_tokens=max_prompt_tokens,
        threads=threads,
        peers=tuple(peer or ()),
        memory=concurrency is None,
        concurrency=concurrency or DEFAULTS.concurrency,
        quality_floor=quality_floor(),
    )
    check_wanted(wanted)
    check_outputs(out, markdown, plots)
    check_artifacts(artifacts)
    on = pick_device(device)
    check_peers(chosen.peers, device=on, temperature=temperature, padded=pad_target is not None)
    check_together(
        chosen, on, check_cpu=check_cpu, throughput=concurrency is not None, files=(markdown, plots)
    )
    from draftwell.flows.workspace import Workspace
    from draftwell.serving.runtime.strategies import StrategyChoice

    rows, workspace = read_rows(prompts), Workspace(pair, dtype, say, on)
    set_threads(threads)
    choices = [StrategyChoice(name.partition("@")[0], parameters) for name, parameters in wanted]
    names = [choice.name for choice in choices]
    loaded = workspace.load(
        slots=concurrency or 1,
        device=on,
        draft_device=pick_draft_device(draft_device, on),
        pad_target=pad_target,
        strategies=choices,
        keep_modules=bool(chosen.peers),
    )
    rows = chosen_rows(loaded, rows, chosen)
    resources = workspace.resources(loaded, names, folder=artifacts)
    if concurrency is not None:
        return bench_batches(loaded, resources, wanted, rows, chosen, out)
    # compiling takes minutes, and this need not be fast
    reference = workspace.load(device="cpu", compiled=False) if check_cpu else None
    report = bench_strategies(loaded, resources, wanted, rows, chosen, reference)
    choice = {
        "mix": mix,
        "max_prompt_tokens": max_prompt_tokens,
        "prompts_file": prompts.name if prompts else "demo",
    }
    show(
        report.model_copy(update={"settings": report.settings.model_copy(update=choice)}),
        out,
        markdown,
        plots,
    )


def bench_strategies(
    pair: LoadedPair,
    resources: StrategyResources,
    wanted: Wanted,
    rows: list[Prompt],
    settings: BenchSettings,
    other: LoadedPair | None,
) -> BenchReport:
    """The bench behind a progress bar; `other`: the pair on the CPU, whose outputs are compared."""
    from draftwell.components.bench.bench import run_bench

    with progress("bench") as bar:
        return run_bench(
            pair, choices_of(wanted), rows, resources, settings, check=other, progress=bar
        )


def check_outputs(out: Path | None, markdown: Path | None, plots: Path | None) -> None:
    """Refuse, before any work, files that cannot be written and plots that cannot be drawn."""
    from draftwell.components.report.drawing import check_drawing

    for file in (out, markdown):
        if file is not None:
            check_output(file)
    if plots is not None:
        check_folder(plots)
        check_drawing()


def check_together(
    settings: BenchSettings,
    device: str,
    *,
    check_cpu: bool,
    throughput: bool,
    files: Sequence[Path | None],
) -> None:
    """Refuse options that do not go together."""
    if check_cpu and (device == "cpu" or settings.temperature > 0):
        raise DraftwellError(
            (
                "--check-cpu checks a greedy run on CUDA: use --device cuda on a machine that "
                "has one, and --temperature 0"
            ),
            code="check_cpu_needs_cuda",
        )
    if throughput and (settings.peers or any(files) or check_cpu):
        raise DraftwellError(
            (
                "--concurrency measures throughput only: leave out --peer, --markdown, --plots "
                "and --check-cpu"
            ),
            code="throughput_only",
        )


def show(report: BenchReport, out: Path | None, markdown: Path | None, plots: Path | None) -> None:
    """Write the files that were asked for, and print the tables; exit code 1 where the outputs
    differ from the CPU's."""
    from draftwell.components.gate.verdict_report import (
        bench_markdown,
        bench_plots,
        bench_table,
        headline_table,
        write_text,
    )

    if out is not None:
        write_json(out, report.to_json())
    if markdown is not None:
        write_text(markdown, bench_markdown(report))
    if plots is not None:
        bench_plots(report, plots)
    wide_console().print(bench_table(report))
    wide_console().print(headline_table(report))
    if report.cpu_check is not None and not report.cpu_check.passed:
        say(
            "outputs differ from the CPU's in places that are no near-ties: see cpu_check "
            "in the JSON report"
        )
        raise typer.Exit(1)


def bench_batches(
    pair: LoadedPair,
    resources: StrategyResources,
    wanted: Wanted,
    rows: list[Prompt],
    settings: BenchSettings,
    out: Path | None,
) -> None:
    """Throughput of one request at a time and of several at once, as a table and, where asked for,
    as JSON."""
    from draftwell.components.bench.throughput import batch_table, batch_throughput

    with progress("bench") as bar:
        report = batch_throughput(pair, resources, choices_of(wanted), rows, settings, progress=bar)
    if out is not None:
        write_json(out, report)
    wide_console().print(batch_table(report))


def parse_wanted(strategies: str, settings: Sequence[str]) -> Wanted:
    """Configs in the order they were named; autoregressive comes first whether it was named or not.

    `--set strategy.key=value` sets a parameter of every config of that strategy that does not set
    it itself.
    """
    from draftwell.components.bench.runner import core_plan
    from draftwell.flows.workspace import parse_settings
    from draftwell.serving.runtime.strategies import find_strategy

    wanted: Wanted = [("autoregressive", {})]
    for item in (item.strip() for item in strategies.split(",")):
        name, *pairs = item.split(":")
        if item and (name, pairs) != ("autoregressive", []):
            find_strategy(core_plan(name)[0])
            wanted.append((name, parse_settings(pairs)))
    for key, value in parse_settings(settings).items():
        name, dot, field = key.partition(".")
        meant = [parameters for config, parameters in wanted if config.partition("@")[0] == name]
        if not dot or not meant:
            raise DraftwellError(
                f"--set {key}={value} names no benched strategy: write it as strategy.key=value",
                code="set_names_no_strategy",
            )
        for parameters in meant:
            parameters.setdefault(field, value)
    return wanted


def choices_of(wanted: Wanted) -> list[StrategyChoice]:
    """The strategies that were asked for, as the bench takes them."""
    from draftwell.serving.runtime.strategies import StrategyChoice

    return [StrategyChoice(name, parameters) for name, parameters in wanted]


def check_wanted(wanted: Wanted) -> None:
    """Refuse, before models are loaded, what could not be run."""
    from draftwell.components.bench.runner import core_plan, labels_of
    from draftwell.serving.runtime.strategies import build_strategy

    for name, parameters in wanted:
        build_strategy(core_plan(name)[0], dict(parameters))
    labels_of(choices_of(wanted))


def read_rows(path: Path | None) -> list[Prompt]:
    """All prompts of a file, or those that the project ships."""
    from draftwell.components.prompts.prompt import demo_prompts, read_prompts

    return read_prompts(path) if path else demo_prompts()


def chosen_rows(pair: LoadedPair, rows: list[Prompt], settings: BenchSettings) -> list[Prompt]:
    """Those that are short enough, of every task in turn where asked for, and of these the first
    `limit`."""
    from draftwell.components.prompts.prompt import ids_of, mixed

    longest = settings.max_prompt_tokens
    short: list[Any] = [row for row in rows if longest is None or len(ids_of(pair, row)) <= longest]
    if not short:
        raise DraftwellError(
            (
                f"no prompt has at most {longest} tokens under this pair's chat template: "
                "raise --max-prompt-tokens"
            ),
            code="no_short_prompts",
        )
    return (mixed(short) if settings.mix else short)[: settings.limit]
