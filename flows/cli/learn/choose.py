"""`draftwell step choose`: the choice of strategy and parameters. The command has one parameter
for each flag."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from draftwell.components.engines.remote.address import is_address
from draftwell.components.tune.settings import DEFAULTS, TuneSettings
from draftwell.flows.cli.engine_options import on_other_engine
from draftwell.flows.cli.learn.shared import (
    Column,
    Publish,
    Redact,
    Source,
    Split,
    Traces,
    load_more,
    open_with_progress,
    worker_pool,
)
from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    EngineOption,
    Fresh,
    Levels,
    Limit,
    MaxTokens,
    Methods,
    PadTarget,
    Pair,
    Runner,
    RunnerOption,
    Threads,
    Workers,
    check_output,
    readable,
    say,
)
from draftwell.flows.cli.settings_option import add_command
from draftwell.flows.cli.shared_options import ADDRESS, GRID, LAUNCHER, with_options
from draftwell.flows.context import StepContext, open_trace, training_prompts
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.kinds import READ_BY_STRATEGIES

if TYPE_CHECKING:
    from draftwell.components.prompts.overlap import TrainingPrompts
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.evidence import TuningEvidence

LIMITS = DEFAULTS.constraints


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    launcher = {"launcher": (LauncherOption, None)}
    add_command(app, with_options(choose, ADDRESS, LAUNCHER, GRID, launcher))


Temperature = Annotated[
    float,
    Field(
        ge=0.0,
        le=2.0,
        description=(
            "Of requests to tune for: 0 for greedy ones, above 0 for sampled ones; the "
            "other choice stays."
        ),
    ),
]
Trials = Annotated[
    int | None,
    Field(ge=1, description="Configurations to try by replay, at most; default: all there are."),
]
LosslessOnly = Annotated[
    bool,
    Field(description="Choose among lossless strategies only."),
]
MaxQualityLoss = Annotated[
    float | None,
    Field(
        ge=0,
        le=1,
        description=(
            "With lossless_only=false: relative loss, at most, in the share of tokens that are "
            "the target's argmax, compared with plain "
            "decoding; default: what the gate allows."
        ),
    ),
]
MaxCostRatio = Annotated[
    float | None,
    Field(
        ge=0.01,
        description=(
            "Target calls per token, at most, relative to vanilla SD at its fastest gamma; "
            "default: no limit."
        ),
    ),
]
Study = Annotated[
    Path | None,
    Field(description="File of trials to resume or to create; default: the workspace's."),
]
Schedule = Annotated[
    Path | None,
    Field(
        description=(
            "Draft lengths by load from elsewhere, which are tried beside ours: vLLM's "
            "speculative config, SGLang's adaptive JSON or TensorRT-LLM's options."
        )
    ),
]

LauncherOption = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        metavar="COMMAND",
        help="With --engine URL: what starts it, or its file (docs/launchers.md).",
    ),
]


def choose(
    context: typer.Context,
    pair: Pair = "default",
    traces: Traces = None,
    prompts: Source = None,
    limit: Limit = 12,
    split: Split = "train",
    column: Column = None,
    redact: Redact = False,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    temperature: Temperature = DEFAULTS.temperature,
    trials: Trials = DEFAULTS.trials,
    lossless_only: LosslessOnly = LIMITS.lossless_only,
    max_quality_loss: MaxQualityLoss = None,
    max_cost_ratio: MaxCostRatio = None,
    study: Study = None,
    pad_target: PadTarget = None,
    publish: Publish = True,
    runner: RunnerOption = Runner.threads,
    workers: Workers = 1,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: Threads = None,
    engine: EngineOption = "draftwell",
    methods: Methods = None,
    levels: Levels = (1,),
    schedule: Schedule = None,
    fresh: Fresh = False,
) -> None:
    """Replay every configuration, measure the best few, and choose one, or plain decoding unless
    one is measurably faster. On another engine its ways to speculate are measured by running it.

    Greedy and sampled requests are tuned one at a time (temperature); a release holds both.

    Example: draftwell step choose --pair default --set lossless_only=false --set
    max_quality_loss=0.05
    """
    more = partial(load_more, prompts, limit, split=split, column=column, redact=redact)
    check_options(study, lossless_only, max_quality_loss)
    if on_other_engine(context):
        return tune_on_other(context, more)
    from draftwell.flows.steps import tune as tune_step

    space = Workspace(pair, dtype)
    rows = more(training_prompts(space, traces or space.traces_at(temperature), READ_BY_STRATEGIES))
    limits = tune_step.constraints_of(lossless_only, max_quality_loss, max_cost_ratio)
    settings = TuneSettings(
        constraints=limits, trials=trials, max_tokens=max_tokens, temperature=temperature
    )
    pool, keep = worker_pool(runner, workers, threads, device), pad_target is None
    with open_with_progress(
        "tune", pair, dtype, device, threads, any_strategy=True, pad_target=pad_target
    ) as opened:
        rows = readable(opened.pair, rows, prompts, max_tokens)
        found = open_trace(opened, traces, temperature)
        evidence = tune_step.run_tune(
            opened, found, rows, settings, study=study, keep=keep, workers=pool, limit=limit
        )
    conclude(opened, pair, evidence, publish=publish, saved=keep)


def tune_on_other(context: typer.Context, rows: Callable[[TrainingPrompts], list[Prompt]]) -> None:
    """How another engine speculates."""
    if is_address(str(context.params["engine"])):
        from draftwell.flows.cli.launched import tune_launched

        return tune_launched(context, rows)
    from draftwell.flows.cli.engine import tune_elsewhere

    return tune_elsewhere(context, rows)


def conclude(
    opened: StepContext, pair: str, evidence: TuningEvidence, *, publish: bool, saved: bool
) -> None:
    """Register what was saved, if asked to, and print what was chosen and why."""
    if publish and saved:
        register(opened, pair)
    typer.echo(f"chosen: {evidence.choice.name} {dict(evidence.choice.parameters)}")
    typer.echo(evidence.reason)
    if evidence.levels:
        lengths = ", ".join(f"{level.k} with {level.at_once}" for level in evidence.levels)
        typer.echo(f"draft length by requests at once: {lengths}")
    for name, why in evidence.left_out.items():
        if "temperature" in why:
            say(f"left out: {name}, {why}")
    if evidence.rollouts is not None and evidence.rollouts.summary:
        say(evidence.rollouts.summary)
    if not saved:
        say("the target was padded, so the choice was neither saved nor registered")


def check_options(study: Path | None, lossless_only: bool, max_quality_loss: float | None) -> None:
    """Refuse a file of trials that cannot be written, and say what a limit of quality loss
    needs."""
    if study is not None:
        check_output(study)
    if lossless_only and max_quality_loss is not None:
        say(
            "max_quality_loss changes nothing without lossless_only=false: lossless strategies "
            "lose no quality"
        )


def register(opened: StepContext, pair: str) -> None:
    """Publish the workspace's artifacts as the candidate for the device that they were made on."""
    from draftwell.flows.steps import publish as publish_step

    made = publish_step.run_publish(opened, {}, device=opened.pair.device.partition(":")[0])
    judged = f"`draftwell gate --pair {pair} --device {made.device}` judges it"
    say(f"registered {made.name}, the candidate: {judged}")
