"""`draftwell bench`: strategies, and peers where asked for, on the same prompts in one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.options import (
    Artifacts,
    DeviceOption,
    DraftDevice,
    DtypeOption,
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
from serving.errors import DraftwellError

if TYPE_CHECKING:
    from components.prompts.prompt import Prompt
    from serving.runtime.pair import LoadedPair
    from serving.runtime.strategies import StrategyChoice, StrategyResources

Wanted = list[tuple[str, dict[str, str]]]


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(bench)


def bench(
    pair: Pair = "default",
    strategies: Annotated[str, typer.Option("--strategies", help=(
        "Comma-separated: name, name:key=value:key=value for a config of its own, name@1+1 to give each model its own share of the "
        "cores. Autoregressive is always measured."))] = "vanilla_sd",
    prompts: Prompts = None,
    limit: Limit = None,
    mix: Annotated[bool, typer.Option("--mix", help="Take prompts of every task in turn, then the first N.")] = False,
    max_prompt_tokens: Annotated[int | None, typer.Option(
        "--max-prompt-tokens", min=1, help="Leave out prompts of more tokens, chat template included.")] = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Interleaved runs; medians are reported.")] = 1,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    draft_device: DraftDevice = None,
    threads: Threads = None,
    pad_target: PadTarget = None,
    peer: Annotated[list[str] | None, typer.Option("--peer", help="Measure `transformers` in the same run.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="strategy.key=value; may be repeated.")] = None,
    artifacts: Artifacts = None,
    concurrency: Annotated[int | None, typer.Option(
        "--concurrency", min=2, help="Instead: throughput of one request at a time and of so many at once.")] = None,
    check_cpu: Annotated[bool, typer.Option("--check-cpu", help="Check the outputs of a CUDA run against the CPU's.")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write tables to this file.")] = None,
    plots: Annotated[Path | None, typer.Option("--plots", help="Draw PNG plots into this folder.")] = None,
) -> None:
    """Compare strategies on the same prompts, interleaved, and print one table.

    Example: draftwell bench --strategies vanilla_sd,spide,sprinter:tau=0.9 --limit 8 --json report.json
    """
    from components.bench.bench import run_bench as measure
    from components.gate.verdict_report import bench_markdown, bench_plots, bench_table, headline_table, write_text
    from components.report.drawing import check_drawing
    from flows.workspace import Workspace

    wanted = parse_wanted(strategies, settings or [])
    check_wanted(wanted, peer or [])
    for file in (out, markdown):
        if file is not None:
            check_output(file)
    if plots is not None:
        check_folder(plots)
        check_drawing()
    check_artifacts(artifacts)
    chosen_device = pick_device(device)
    chosen_draft_device = pick_draft_device(draft_device, chosen_device)
    if check_cpu and (chosen_device == "cpu" or temperature > 0):
        raise DraftwellError("--check-cpu checks a greedy run on CUDA: use --device cuda on a machine that has one, and --temperature 0")
    if concurrency is not None and (peer or markdown or plots or check_cpu):
        raise DraftwellError("--concurrency measures throughput alone: leave out --peer, --markdown, --plots and --check-cpu")
    rows = read_rows(prompts)
    workspace = Workspace(pair, dtype, say)
    set_threads(threads)
    names = [name.partition("@")[0] for name, _ in wanted]
    loaded = workspace.load(slots=concurrency or 1, device=chosen_device, draft_device=chosen_draft_device, pad_target=pad_target,
                            strategies=names, keep_modules=bool(peer))
    rows = chosen_rows(loaded, rows, limit, mix, max_prompt_tokens)
    resources = workspace.resources(loaded, names, folder=artifacts)
    if concurrency is not None:
        bench_batches(loaded, resources, wanted, rows, concurrency, max_tokens, temperature, runs, seed, out)
        return
    other = workspace.load(device="cpu") if check_cpu else None
    with progress("bench") as bar:
        report = measure(loaded, choices_of(wanted), rows, resources, max_tokens=max_tokens, temperature=temperature, runs=runs, seed=seed,
                         peers=tuple(peer or ()), memory=True, check=other, progress=bar)
    report["settings"] |= {"mix": mix, "max_prompt_tokens": max_prompt_tokens, "prompts_file": prompts.name if prompts else "demo"}
    if out is not None:
        write_json(out, report)
    if markdown is not None:
        write_text(markdown, bench_markdown(report))
    if plots is not None:
        bench_plots(report, plots)
    wide_console().print(bench_table(report))
    wide_console().print(headline_table(report))
    if report["cpu_check"] is not None and not report["cpu_check"]["passed"]:
        say("outputs differ from the CPU's at places that are no near-ties: see cpu_check in the JSON report")
        raise typer.Exit(1)


def bench_batches(
    pair: LoadedPair,
    resources: StrategyResources,
    wanted: Wanted,
    rows: list[Prompt],
    concurrency: int,
    max_tokens: int,
    temperature: float,
    runs: int,
    seed: int,
    out: Path | None,
) -> None:
    """Throughput at one and at several requests at once, as a table and, where asked for, as JSON."""
    from components.bench.throughput import batch_table, batch_throughput

    with progress("bench") as bar:
        report = batch_throughput(pair, resources, choices_of(wanted), rows, concurrency=concurrency, max_tokens=max_tokens,
                                  temperature=temperature, runs=runs, seed=seed, progress=bar)
    if out is not None:
        write_json(out, report)
    wide_console().print(batch_table(report))


def parse_wanted(strategies: str, settings: Sequence[str]) -> Wanted:
    """Configs in the order they were named; autoregressive comes first whether it was named or not.

    `--set strategy.key=value` speaks of every config of that strategy that does not set the key itself.
    """
    from components.bench.runner import core_plan
    from flows.workspace import parse_settings
    from serving.runtime.strategies import find_strategy

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
            raise DraftwellError(f"--set {key}={value} names no benched strategy: write it as strategy.key=value")
        for parameters in meant:
            parameters.setdefault(field, value)
    return wanted


def choices_of(wanted: Wanted) -> list[StrategyChoice]:
    """The strategies that were asked for, as the bench takes them."""
    from serving.runtime.strategies import StrategyChoice

    return [StrategyChoice(name, parameters) for name, parameters in wanted]


def check_wanted(wanted: Wanted, peers: Sequence[str]) -> None:
    """Refuse, before models are loaded, what could not be run."""
    from components.bench.peers import PEERS
    from components.bench.runner import core_plan, labels_of
    from serving.runtime.strategies import build_strategy

    for name, parameters in wanted:
        build_strategy(core_plan(name)[0], dict(parameters))
    labels_of(choices_of(wanted))
    unknown = next((name for name in peers if name not in PEERS), None)
    if unknown:
        raise DraftwellError(f"unknown peer {unknown!r}: the only peer is {', '.join(PEERS)}")


def read_rows(path: Path | None) -> list[Prompt]:
    """All prompts of a file, or those that the project ships."""
    from components.prompts.prompt import demo_prompts, read_prompts

    return read_prompts(path) if path else demo_prompts()


def chosen_rows(pair: LoadedPair, rows: list[Prompt], limit: int | None, mix: bool, longest: int | None) -> list[Prompt]:
    """Those that are short enough, of every task in turn where asked for, and of these the first `limit`."""
    from components.prompts.prompt import ids_of, mixed

    short: list[Any] = [row for row in rows if longest is None or len(ids_of(pair, row)) <= longest]
    if not short:
        raise DraftwellError(f"no prompt has at most {longest} tokens under this pair's chat template: raise --max-prompt-tokens")
    return (mixed(short) if mix else short)[:limit]
