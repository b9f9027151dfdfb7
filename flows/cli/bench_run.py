"""What `draftwell bench` does when it is called."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftwell.components.bench.answers.exactness import (
    BESIDE,
    differing,
    exactness,
    exactness_table,
)
from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.loads import level_table, measure_levels
from draftwell.components.bench.peers import check_peers
from draftwell.components.bench.report.plots import bench_plots
from draftwell.components.bench.report.tables import (
    bench_markdown,
    bench_table,
    category_table,
    entries_of,
    headline_table,
)
from draftwell.components.bench.runner import core_plan, labels_of
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.throughput import batch_table, batch_throughput
from draftwell.components.export.expected import Kept, expected_table
from draftwell.components.export.profile import read_profile
from draftwell.components.prompts.prompt import demo_prompts, ids_of, mixed
from draftwell.components.report.drawing import check_drawing
from draftwell.flows.cli.options import (
    check_artifacts,
    check_folder,
    check_output,
    pick_device,
    pick_draft_device,
    progress,
    prompts_from,
    readable,
    say,
    set_threads,
    wide_console,
    write_json,
)
from draftwell.flows.settings import quality_floor
from draftwell.flows.steps.profile import find_or_measure_profile
from draftwell.flows.workspace import Workspace, parse_settings
from draftwell.registry.pairs.fitting import check_fits
from draftwell.serving.device import device_type
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_text
from draftwell.serving.memory import LONGEST_CONTEXT
from draftwell.serving.number_format import dtype_of, weights_of
from draftwell.serving.runtime.model_files import context_within, read_config
from draftwell.serving.runtime.strategies import StrategyChoice, build_strategy, find_strategy

if TYPE_CHECKING:
    from draftwell.components.bench.schema import BenchReport
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.runtime.pair import LoadedPair
    from draftwell.serving.runtime.strategies import StrategyResources


@dataclass(frozen=True)
class Outputs:
    """Where a report goes, by the endings of the names that `--out` was given."""

    report: Path | None = None
    markdown: Path | None = None
    plots: Path | None = None


def outputs_of(paths: Sequence[Path] | None, *, report_alone: bool = False) -> Outputs:
    """Files and folders of `--out`; all are checked before any work.

    Raises:
        DraftwellError: an ending that no format has (`unknown_ending`), one that this bench does
            not write, or a place that cannot be written.
    """
    kinds = {".json": "report", ".md": "markdown", "": "plots"}
    found: dict[str, Path] = {}
    for path in paths or ():
        kind = kinds.get(path.suffix)
        if kind is None or (report_alone and kind != "report"):
            formats = "FILE.json" if report_alone else "FILE.json, FILE.md or a folder for plots"
            raise DraftwellError(f"--out {path}: write {formats}", code="unknown_ending")
        found[kind] = path
    outputs = Outputs(**found)
    for file in filter(None, (outputs.report, outputs.markdown)):
        check_output(file)
    if outputs.plots is not None:
        check_folder(outputs.plots)
        check_drawing()
    return outputs


def bench_pair(context: typer.Context) -> None:
    """Check the command's options, load the pair, measure, and show what was found."""
    given = context.params
    levels = given["concurrency"]
    several = levels and max(levels) > 1
    settings = bench_settings({**given, "concurrency": max(levels) if several else None})
    wanted = parse_wanted(given["strategies"], given["parameters"])
    check_wanted(wanted)
    outputs = outputs_of(given["out"])
    tell = teller(outputs.report, as_json=given["as_json"])
    check_profile(given["profile"])
    check_artifacts(given["artifacts"])
    device = pick_device(given["device"])
    check_peers(
        settings.peers,
        device=device,
        padded=given["pad_target"] is not None,
    )
    check_together(settings, device, given, outputs)
    file = given["prompts"]
    slots = BESIDE if given["exactness"] else max(levels) if levels else None
    draft_device = pick_draft_device(given["draft_device"], device)
    rows = prompts_from(file) if file else demo_prompts()
    workspace = Workspace(given["pair"], given["dtype"], say, device)
    set_threads(settings.threads)
    names = [core_plan(choice.name)[0] for choice in wanted]
    positions = positions_for(workspace, device, settings)
    pair = workspace.load(
        slots=slots or 1,
        max_context=positions,
        device=device,
        draft_device=draft_device,
        pad_target=given["pad_target"],
        strategies=[
            StrategyChoice(name, choice.parameters)
            for name, choice in zip(names, wanted, strict=True)
        ],
        keep_modules=bool(settings.peers) and weights_of(workspace.dtype) is None,
    )
    rows = readable(pair, rows, file, settings.max_tokens)
    rows = chosen_rows(pair, rows, settings, given["limit"])
    profile = find_or_measure_profile(workspace, pair, names, given["artifacts"])
    resources = workspace.resources(pair, names, folder=given["artifacts"], profile=profile)
    if given["exactness"]:
        return check_exactness(pair, resources, wanted, rows, settings, workspace, tell)
    if levels and (len(levels) > 1 or not several or settings.peers):
        return bench_levels(pair, resources, wanted, rows, settings, levels, given, tell)
    if slots is not None:
        with progress("bench") as bar:
            asked = (pair, resources, wanted, rows, settings)
            found = batch_throughput(*asked, left_out={}, progress=bar)
        return show_batches(found, tell)
    reference = None
    if given["check_cpu"]:
        reference = workspace.load(device="cpu", max_context=positions)
    report = measured(pair, resources, wanted, rows, settings, reference)
    shown = report.settings.model_copy(update={"prompts_file": file.name if file else "demo"})
    show(report.model_copy(update={"settings": shown}), given, outputs, tell)


def measured(
    pair: LoadedPair,
    resources: StrategyResources,
    wanted: Sequence[StrategyChoice],
    rows: Sequence[Prompt],
    settings: BenchSettings,
    reference: LoadedPair | None,
) -> BenchReport:
    """The report of all that the command measures, with a progress bar."""
    with progress("bench") as bar:
        return run_bench(
            pair,
            wanted,
            rows,
            resources,
            settings,
            check=reference,
            memory=True,
            floor=quality_floor(),
            left_out={},
            progress=bar,
        )


def positions_for(workspace: Workspace, device: str, settings: BenchSettings) -> int | None:
    """Positions of a slot: as many as prompts of `max_prompt_tokens` take with their answers, as
    far as the target was trained for; None where that is no more than a pair has by itself."""
    wanted = (settings.max_prompt_tokens or 0) + settings.max_tokens
    if wanted <= LONGEST_CONTEXT:
        return None
    check_fits(workspace.spec, device_type(device), workspace.dtype)  # before it is downloaded
    return context_within(read_config(workspace.files().target), wanted)


def bench_settings(given: Mapping[str, Any]) -> BenchSettings:
    """Settings of the options that have their names."""
    return BenchSettings(
        **{
            name: value
            for name, value in given.items()
            if name in BenchSettings.model_fields and value is not None
        }
    )


def check_profile(path: Path | None) -> None:
    """Refuse, before any work, a profile that cannot be compared with."""
    if path is not None:
        _ = read_profile(path).expected


def check_together(
    settings: BenchSettings, device: str, given: Mapping[str, Any], outputs: Outputs
) -> None:
    """Refuse options that do not go together."""
    if given["check_cpu"] and (device == "cpu" or settings.temperature > 0):
        raise DraftwellError(
            "check_cpu checks a greedy run on CUDA: use --device cuda on a machine that has one, "
            "and temperature 0",
            code="check_cpu_needs_cuda",
        )
    alone = outputs.markdown or outputs.plots or given["check_cpu"]
    more = given["profile"] is not None or settings.runs != BenchSettings().runs
    if given["exactness"] and (
        settings.peers or alone or more or given["concurrency"] or settings.temperature > 0
    ):
        raise DraftwellError(
            "exactness compares greedy answers in ways of its own: leave out concurrency, runs, "
            "temperature, profile, peers, check_cpu, and what --out names but a .json file",
            code="exactness_only",
        )
    if given["concurrency"] and (alone or given["profile"] is not None):
        raise DraftwellError(
            "concurrency measures throughput only: leave out profile, check_cpu, and what --out "
            "names but a .json file",
            code="throughput_only",
        )
    if (
        settings.peers
        and given["dtype"]
        and weights_of(given["dtype"])
        and not given["concurrency"]
    ):
        raise DraftwellError(
            f"peers stand beside weights of fewer bytes at numbers of requests at once only: add "
            f"--set concurrency=1, or use the dtype {dtype_of(given['dtype'])}",
            code="weights_unsupported",
        )
    if "transformers" in settings.peers and given["concurrency"]:
        raise DraftwellError(
            "transformers is measured one request at a time only: leave it out of peers, or leave "
            "out concurrency",
            code="throughput_only",
        )


def check_exactness(
    pair: LoadedPair,
    resources: StrategyResources,
    wanted: Sequence[StrategyChoice],
    rows: Sequence[Prompt],
    settings: BenchSettings,
    workspace: Workspace,
    tell: Teller,
) -> None:
    """Compare the answers of lossless strategies with plain decoding's; exit code 1 where one
    differs."""
    if any("@" in one.name for one in wanted):
        raise DraftwellError(
            "exactness knows no plans of cores: name strategies without @",
            code="exactness_only",
        )
    if not pair.exact:
        raise DraftwellError(
            "forward passes of this pair are not exact here, so answers may depend on what runs "
            "beside them: docs/exactness.md says which models and machines are",
            code="not_exact",
        )
    lossless = [one for one in wanted if find_strategy(one.name).lossless]
    for one in wanted:
        if one not in lossless:
            say(f"{one.name} is left out: it is lossy")
    sampling = pair.sampling(max_tokens=settings.max_tokens)
    file = workspace.device_reports / "exactness.jsonl"
    with progress("exactness") as bar:
        found = exactness(pair, resources, lossless, rows, sampling, file, progress=bar)
    tell(found, exactness_table(found))
    if differing(found):
        raise typer.Exit(1)


def bench_levels(
    pair: LoadedPair,
    resources: StrategyResources,
    wanted: Sequence[StrategyChoice],
    rows: Sequence[Prompt],
    settings: BenchSettings,
    levels: Sequence[int],
    given: Mapping[str, Any],
    tell: Teller,
) -> None:
    """Several numbers of requests at once, beside peers; those read whole weights."""
    source = pair
    if settings.peers and weights_of(pair.dtype) is not None:
        source = Workspace(given["pair"], dtype_of(pair.dtype), say, "cpu").load(keep_modules=True)
    with progress("bench") as bar:
        found = measure_levels(
            pair, source, resources, wanted, rows, levels, settings, left_out={}, progress=bar
        )
    tell(found, level_table(found))
    say_left_out(found["left_out"])


def show_batches(found: Mapping[str, Any], tell: Teller) -> None:
    """Throughput of one request at a time and of several at once, as a table and, where asked for,
    as JSON."""
    tell(found, batch_table(found))
    say_left_out(found["left_out"])


Teller = Callable[..., None]


def teller(file: Path | None, *, as_json: bool) -> Teller:
    """What writes a report to a file, where one is named, and prints it: as JSON, or tables."""

    def tell(document: Mapping[str, Any], *tables: object) -> None:
        if file is not None:
            write_json(file, document)
        if as_json:
            typer.echo(json.dumps(document, indent=2, allow_nan=False))
            return
        for table in tables:
            if table is not None:
                wide_console().print(table)

    return tell


def show(report: BenchReport, given: Mapping[str, Any], outputs: Outputs, tell: Teller) -> None:
    """Write the files that were asked for, and print the tables; exit code 1 where the outputs
    differ from the CPU's."""
    if outputs.markdown is not None:
        write_text(outputs.markdown, bench_markdown(report))
    if outputs.plots is not None:
        bench_plots(report, outputs.plots)
    tables: list[object] = [bench_table(report), headline_table(report)]
    if given["prompts"] is not None:
        tables.append(category_table(entries_of(report)))
    if given["profile"] is not None:
        kept = [Kept(label, one.rounds, one.accepted_at) for label, one in entries_of(report)]
        tables.append(expected_table(read_profile(given["profile"]), kept))
    tell(report.to_json(), *tables)
    say_left_out(report.left_out)
    if report.cpu_check is not None and not report.cpu_check.passed:
        say(
            "outputs differ from the CPU's in places that are no near-ties: see cpu_check "
            "in the JSON report"
        )
        raise typer.Exit(1)


def say_left_out(left_out: Mapping[str, str]) -> None:
    """A line for each contender that failed."""
    for label, reason in left_out.items():
        say(f"{label} is left out: {reason}")


def parse_wanted(strategies: str, settings: Mapping[str, str]) -> list[StrategyChoice]:
    """Configs in the order they were named; autoregressive comes first whether it was named or not.

    `--set strategy.key=value` sets a parameter of every config of that strategy that does not set
    it itself.
    """
    wanted: list[tuple[str, dict[str, str]]] = [("autoregressive", {})]
    for item in (item.strip() for item in strategies.split(",")):
        name, *pairs = item.split(":")
        if item and (name, pairs) != ("autoregressive", []):
            find_strategy(core_plan(name)[0])
            wanted.append((name, parse_settings(pairs)))
    for key, value in settings.items():
        name, dot, field = key.partition(".")
        meant = [parameters for config, parameters in wanted if config.partition("@")[0] == name]
        if not dot or not meant:
            raise DraftwellError(
                f"--set {key}={value} names no benched strategy: write it as strategy.key=value",
                code="set_names_no_strategy",
            )
        for parameters in meant:
            parameters.setdefault(field, value)
    return [StrategyChoice(*config) for config in wanted]


def check_wanted(wanted: Sequence[StrategyChoice]) -> None:
    """Refuse, before models are loaded, what could not be run."""
    for choice in wanted:
        build_strategy(core_plan(choice.name)[0], dict(choice.parameters))
    labels_of(wanted)


def chosen_rows(
    pair: LoadedPair, rows: list[Prompt], settings: BenchSettings, limit: int | None
) -> list[Prompt]:
    """Those that are short enough, of every task in turn where asked for, and of these the first
    `limit`."""
    longest = settings.max_prompt_tokens
    short = [row for row in rows if longest is None or len(ids_of(pair, row)) <= longest]
    if not short:
        raise DraftwellError(
            f"no prompt has at most {longest} tokens under this pair's chat template: "
            "raise max_prompt_tokens",
            code="no_short_prompts",
        )
    return (mixed(short) if settings.mix else short)[:limit]
