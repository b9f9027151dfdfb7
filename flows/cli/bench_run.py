"""What `draftwell bench` does when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.report.plots import bench_plots
from draftwell.components.bench.report.tables import bench_markdown, bench_table, headline_table
from draftwell.components.bench.runner import core_plan, labels_of
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.throughput import batch_table, batch_throughput
from draftwell.components.prompts.prompt import demo_prompts, ids_of, mixed, read_prompts
from draftwell.components.report.drawing import check_drawing
from draftwell.flows.cli.options import (
    check_folder,
    check_output,
    progress,
    say,
    set_threads,
    wide_console,
    write_json,
)
from draftwell.flows.settings import quality_floor
from draftwell.flows.steps.profile import find_or_measure_profile
from draftwell.flows.workspace import Workspace, parse_settings
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_text
from draftwell.serving.runtime.strategies import StrategyChoice, build_strategy, find_strategy

if TYPE_CHECKING:
    from draftwell.components.bench.schema import BenchReport
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.runtime.pair import LoadedPair
    from draftwell.serving.runtime.strategies import StrategyResources


Wanted = list[tuple[str, dict[str, str]]]


ELSEWHERE = (
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


@dataclass(frozen=True)
class PairAt:
    """A pair, and how it is loaded."""

    name: str
    dtype: str | None
    device: str
    draft_device: str | None
    pad_target: float | None
    artifacts: Path | None


def bench_settings(context: typer.Context) -> BenchSettings:
    """Settings of the options that have their names, and what this command always does."""
    named_alike = {
        name: value
        for name, value in context.params.items()
        if name in BenchSettings.model_fields and value is not None
    }
    return BenchSettings(
        **named_alike,
        peers=tuple(context.params["peer"] or ()),
        memory=context.params["concurrency"] is None,
        leave_out=True,
        quality_floor=quality_floor(),
    )


def bench_pair(
    pair: PairAt,
    wanted: Wanted,
    prompts: Path | None,
    settings: BenchSettings,
    files: Files,
    *,
    slots: int | None,
    check_cpu: bool,
) -> None:
    """Load a pair, measure, and show what was found; with `slots` the throughput of so many."""

    rows, workspace = read_rows(prompts), Workspace(pair.name, pair.dtype, say, pair.device)
    set_threads(settings.threads)
    choices = [StrategyChoice(name.partition("@")[0], parameters) for name, parameters in wanted]
    loaded = workspace.load(
        slots=slots or 1,
        device=pair.device,
        draft_device=pair.draft_device,
        pad_target=pair.pad_target,
        strategies=choices,
        keep_modules=bool(settings.peers),
    )
    rows = chosen_rows(loaded, rows, settings)
    names = [choice.name for choice in choices]
    profile = find_or_measure_profile(workspace, loaded, names, pair.artifacts)
    resources = workspace.resources(loaded, names, folder=pair.artifacts, profile=profile)
    if slots is not None:
        bench_batches(loaded, resources, wanted, rows, settings, files.out)
        return
    # compiling takes minutes, and this need not be fast
    reference = workspace.load(device="cpu", compiled=False) if check_cpu else None
    report = bench_strategies(loaded, resources, wanted, rows, settings, reference)
    name = prompts.name if prompts else "demo"
    shown = report.settings.model_copy(update={"prompts_file": name})
    show(report.model_copy(update={"settings": shown}), files)


@dataclass(frozen=True)
class Files:
    """Where to write what was found; None writes nothing."""

    out: Path | None
    markdown: Path | None
    plots: Path | None

    def check(self) -> None:
        """Refuse, before any work, files that cannot be written and plots that cannot be drawn."""

        for file in (self.out, self.markdown):
            if file is not None:
                check_output(file)
        if self.plots is not None:
            check_folder(self.plots)
            check_drawing()


def bench_strategies(
    pair: LoadedPair,
    resources: StrategyResources,
    wanted: Wanted,
    rows: list[Prompt],
    settings: BenchSettings,
    other: LoadedPair | None,
) -> BenchReport:
    """The bench behind a progress bar; `other`: the pair on the CPU, whose outputs are compared."""

    with progress("bench") as bar:
        return run_bench(
            pair, choices_of(wanted), rows, resources, settings, check=other, progress=bar
        )


def check_together(
    settings: BenchSettings,
    device: str,
    *,
    check_cpu: bool,
    throughput: bool,
    files: Files,
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
    if throughput and (settings.peers or files.markdown or files.plots or check_cpu):
        raise DraftwellError(
            (
                "--concurrency measures throughput only: leave out --peer, --markdown, --plots "
                "and --check-cpu"
            ),
            code="throughput_only",
        )


def show(report: BenchReport, files: Files) -> None:
    """Write the files that were asked for, and print the tables; exit code 1 where the outputs
    differ from the CPU's."""

    if files.out is not None:
        write_json(files.out, report.to_json())
    if files.markdown is not None:
        write_text(files.markdown, bench_markdown(report))
    if files.plots is not None:
        bench_plots(report, files.plots)
    wide_console().print(bench_table(report))
    wide_console().print(headline_table(report))
    say_left_out(report.left_out)
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

    with progress("bench") as bar:
        report = batch_throughput(pair, resources, choices_of(wanted), rows, settings, progress=bar)
    if out is not None:
        write_json(out, report)
    wide_console().print(batch_table(report))
    say_left_out(report["left_out"])


def say_left_out(left_out: Mapping[str, str]) -> None:
    """A line for each contender that failed."""
    for label, reason in left_out.items():
        say(f"{label} is left out: {reason}")


def parse_wanted(strategies: str, settings: Sequence[str]) -> Wanted:
    """Configs in the order they were named; autoregressive comes first whether it was named or not.

    `--set strategy.key=value` sets a parameter of every config of that strategy that does not set
    it itself.
    """

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

    return [StrategyChoice(name, parameters) for name, parameters in wanted]


def check_wanted(wanted: Wanted) -> None:
    """Refuse, before models are loaded, what could not be run."""

    for name, parameters in wanted:
        build_strategy(core_plan(name)[0], dict(parameters))
    labels_of(choices_of(wanted))


def read_rows(path: Path | None) -> list[Prompt]:
    """All prompts of a file, or those that the project ships."""

    return read_prompts(path) if path else demo_prompts()


def chosen_rows(pair: LoadedPair, rows: list[Prompt], settings: BenchSettings) -> list[Prompt]:
    """Those that are short enough, of every task in turn where asked for, and of these the first
    `limit`."""

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
