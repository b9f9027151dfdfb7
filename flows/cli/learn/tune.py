"""`draftwell tune`: the choice of strategy and parameters. The command has one parameter for each
flag."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwell.components.tune.settings import DEFAULTS, TuneSettings
from draftwell.flows import context as step_context
from draftwell.flows.cli.engine_options import on_other_engine
from draftwell.flows.cli.learn.shared import (
    Column,
    Publish,
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
    EngineName,
    EngineOption,
    Fresh,
    Limit,
    MaxTokens,
    PadTarget,
    Pair,
    Runner,
    RunnerOption,
    Threads,
    Workers,
    check_output,
    say,
)
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.kinds import READ_BY_STRATEGIES

LIMITS = DEFAULTS.constraints


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(tune)


def tune(
    context: typer.Context,
    pair: Pair = "default",
    traces: Traces = None,
    prompts: Source = None,
    limit: Limit = 12,
    split: Split = "train",
    column: Column = None,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0.0,
            max=2.0,
            help=(
                "Of requests to tune for: 0 for greedy ones, above 0 for sampled ones; the "
                "other choice stays."
            ),
        ),
    ] = DEFAULTS.temperature,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            min=1,
            help="Configurations to try by replay, at most; default: all there are.",
        ),
    ] = DEFAULTS.trials,
    lossless_only: Annotated[
        bool,
        typer.Option(
            "--lossless-only/--allow-lossy", help="Choose among lossless strategies only."
        ),
    ] = LIMITS.lossless_only,
    max_quality_loss: Annotated[
        float | None,
        typer.Option(
            "--max-quality-loss",
            min=0,
            max=1,
            help="With --allow-lossy: relative loss, at most, in the share of tokens that are "
            "the target's argmax, compared with plain "
            "decoding; default: what the gate allows.",
        ),
    ] = None,
    max_cost_ratio: Annotated[
        float | None,
        typer.Option(
            "--max-cost-ratio",
            min=0.01,
            help=(
                "Target calls per token, at most, relative to vanilla SD at its fastest gamma; "
                "default: no limit."
            ),
        ),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            "--study", help="File of trials to resume or to create; default: the workspace's."
        ),
    ] = None,
    pad_target: PadTarget = None,
    publish: Publish = True,
    runner: RunnerOption = Runner.threads,
    workers: Workers = 1,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: Threads = None,
    engine: EngineOption = EngineName.draftwell,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="With --engine vllm: comma-separated names to choose among; default: all of "
            "ngram, suffix, draft_model and "
            "eagle3 that are possible.",
        ),
    ] = None,
    levels: Annotated[
        str,
        typer.Option(
            "--levels",
            help=(
                "With --engine vllm: requests at once, from 1; several, such as 1,4,16, give "
                "draft lengths by load."
            ),
        ),
    ] = "1",
    fresh: Fresh = False,
) -> None:
    """Replays every configuration, measures the best few, and picks plain decoding unless one is
    measurably faster.

    Greedy requests and sampled ones are tuned one at a time, each on traces of its temperature; a
    release holds both choices. Prompts that traces and artifacts were made from are left out. An
    interrupted run resumes where it stopped. The choice is registered as a release, the candidate,
    together with the artifacts of the workspace. With --pad-target nothing is saved or registered.

    With --engine vllm, vLLM's ways to speculate are measured by running it, and the choice is
    registered as a release of its own.

    Example: draftwell tune --pair default --allow-lossy --max-quality-loss 0.05
    """
    if on_other_engine(context):
        from draftwell.flows.cli.engine import tune_elsewhere

        return tune_elsewhere(
            context, lambda used: load_more(prompts, limit, used, split=split, column=column)
        )
    from draftwell.flows.steps import publish as publish_step, tune as tune_step

    space = Workspace(pair, dtype)
    used = step_context.training_prompts(
        space, traces or space.traces_at(temperature), READ_BY_STRATEGIES
    )
    rows = load_more(prompts, limit, used, split=split, column=column)
    if study is not None:
        check_output(study)
    if lossless_only and max_quality_loss is not None:
        say(
            "--max-quality-loss changes nothing without --allow-lossy: lossless strategies "
            "lose no quality"
        )
    constraints = tune_step.constraints_of(lossless_only, max_quality_loss, max_cost_ratio)
    settings = TuneSettings(
        constraints=constraints, trials=trials, max_tokens=max_tokens, temperature=temperature
    )
    pool = worker_pool(runner, workers, threads, device)
    with open_with_progress(
        "tune", pair, dtype, device, threads, any_strategy=True, pad_target=pad_target
    ) as opened:
        found = step_context.open_trace(opened, traces, temperature)
        evidence = tune_step.run_tune(
            opened,
            found,
            rows,
            settings,
            study=study,
            keep=pad_target is None,
            workers=pool,
            limit=limit,
        )
    if publish and pad_target is None:
        made = publish_step.run_publish(opened, {}, device=opened.pair.device.partition(":")[0])
        say(
            f"registered {made.name}, the candidate: `draftwell gate --pair {pair} "
            f"--device {made.device}` judges it"
        )
    typer.echo(f"chosen: {evidence.choice.name} {dict(evidence.choice.parameters)}")
    typer.echo(evidence.reason)
    for name, why in evidence.left_out.items():
        if "temperature" in why:
            say(f"left out: {name}, {why}")
    if evidence.rollouts is not None and evidence.rollouts.summary:
        say(evidence.rollouts.summary)
    if pad_target is not None:
        say("the target was padded, so the choice was neither saved nor registered")
