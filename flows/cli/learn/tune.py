"""`draftwell tune`: the choice of strategy and parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.learn.shared import Column, Publish, Source, Split, Traces, load, open_with_progress, worker_pool
from flows.cli.options import (
    DeviceOption,
    DtypeOption,
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


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(tune)


def tune(pair: Pair = "default", traces: Traces = None, prompts: Source = None, limit: Limit = 12, split: Split = "train",
         column: Column = None, max_tokens: MaxTokens = 64,
         trials: Annotated[int, typer.Option("--trials", min=1, help="Configurations tried by replay.")] = 60,
         lossless_only: Annotated[bool, typer.Option("--lossless-only/--allow-lossy", help="Choose among lossless ones only.")] = True,
         max_quality_loss: Annotated[float | None, typer.Option(
             "--max-quality-loss", min=0, max=1,
             help="Of a lossy choice: share of the target's own argmax tokens that it may lose against plain decoding; 0.1 if left "
                  "out.")] = None,
         max_cost_ratio: Annotated[float | None, typer.Option(
             "--max-cost-ratio", min=0.01,
             help="Target calls per token, at most, over those of vanilla SD at its fastest gamma; no limit if left out.")] = None,
         study: Annotated[Path | None, typer.Option(
             "--study", help="SQLite file of trials, to go on with or to make; the workspace's if left out.")] = None,
         pad_target: PadTarget = None, publish: Publish = True, runner: RunnerOption = Runner.threads, workers: Workers = 1,
         dtype: DtypeOption = None, device: DeviceOption = None, threads: Threads = None) -> None:
    """Choose strategy and parameters: many by replay, a few by measurement, never slower than autoregressive.

    A run that was stopped goes on where it was. The choice is registered as a release, the candidate, with the artifacts of the
    workspace; with --pad-target nothing is saved or registered.

    Example: draftwell tune --pair default --trials 60 --allow-lossy --max-quality-loss 0.05
    """
    from components.tune.report.reading import rollout_words
    from flows import context
    from flows.steps import publish as publish_step
    from flows.steps import tune as tune_step

    rows = load(prompts, limit, split=split, column=column)
    if study is not None:
        check_output(study)
    if lossless_only and max_quality_loss is not None:
        say("--max-quality-loss changes nothing without --allow-lossy: lossless strategies lose no quality")
    fan = worker_pool(runner, workers, threads, device)
    with open_with_progress("tune", pair, dtype, device, threads, any_strategy=True, pad_target=pad_target) as opened:
        tuned = tune_step.run_tune(opened, context.open_trace(opened, traces), rows, max_tokens=max_tokens, trials=trials,
                            lossless_only=lossless_only, max_quality_loss=0.1 if max_quality_loss is None else max_quality_loss,
                            max_cost_ratio=max_cost_ratio,
                            study=study, keep=pad_target is None, fan=fan)
    if publish and pad_target is None:
        made = publish_step.run_publish(opened, {}, device=opened.pair.device.partition(":")[0])
        say(f"registered {made.name}, the candidate: `draftwell gate --pair {pair}` judges it")
    typer.echo(f"chosen: {tuned.strategy} {tuned.parameters}")
    typer.echo(str(tuned.evidence.get("reason", "")))
    if words := rollout_words(tuned.evidence):
        say(words)
    if pad_target is not None:
        say("the target was padded, so the choice was neither saved nor registered")
