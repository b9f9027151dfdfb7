"""Commands that learn from traces: train, calibrate."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.learn.shared import Column, Publish, Source, Split, Traces, load, open_with_progress, publish_kinds
from flows.cli.options import DeviceOption, DtypeOption, Limit, Pair, Seed, Threads, say
from serving.artifacts.kinds import made_by
from serving.errors import DraftwellError


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    for command in (train, calibrate):
        app.command()(command)


class Trained(StrEnum):
    """Kinds of artifact that are trained."""

    VERIFIER = "verifier"
    ACCEPTANCE_HEAD = "acceptance_head"


def train(pair: Pair = "default", traces: Traces = None, publish: Publish = True,
          kind: Annotated[Trained, typer.Option("--kind", help="What to train: sprinter's verifier or specdec_pp's acceptance head.")] = (
              Trained.VERIFIER),
          test: Annotated[Path | None, typer.Option("--test", help="Trace folder of other prompts to test on; a fifth of the prompts is "
                                                                     "held out if left out.")] = None,
          ratio: Annotated[float | None, typer.Option("--ratio", help="Verifier: lambda, the largest q/p of an acceptable token; 1.2 if "
                                                                        "left out.")] = None,
          eta_fp: Annotated[float | None, typer.Option("--eta-fp", help="Verifier: share of tokens with q/p > 1 that it may keep; sets "
                                                                          "its threshold; 0.1 if left out.")] = None,
          features: Annotated[str | None, typer.Option("--features", help="Verifier: comma-separated ones of before, after, scalars; the "
                                                                            "best by cross-validation if left out.")] = None,
          seed: Seed = 0, dtype: DtypeOption = None, device: DeviceOption = None, threads: Threads = None) -> None:
    """Train a SPRINTER verifier, or a SpecDec++ acceptance head, on collected traces.

    Example: draftwell train --pair default
    """
    from flows import context
    from flows.steps import train as train_step

    options = {"ratio": ratio, "wanted_false_positive": eta_fp, "features": features and [name.strip() for name in features.split(",")]}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if given and kind is not Trained.VERIFIER:
        raise DraftwellError("--ratio, --eta-fp and --features are the verifier's: leave them out for an acceptance head")
    with open_with_progress("train", pair, dtype, device, threads) as opened:
        found = context.open_trace(opened, traces)
        untouched = context.open_trace(opened, test) if test else None
        if kind is Trained.VERIFIER:
            report = train_step.run_train(opened, found, test=untouched, seed=seed, **given)
        else:
            report = train_step.run_train_head(opened, found, test=untouched, seed=seed)
    if report["left_out"]:
        say(f"{len(report['left_out'])} prompts of {test} are in the training trace too and were not tested on")
    if publish:
        publish_kinds(opened, kind.value)
    ends = report["intervals"] or {}
    typer.echo("  ".join(f"{name} {format_metric(value)}" + (" [{:.3f}, {:.3f}]".format(*ends[name]) if name in ends else "")
                         for name, value in report.items() if isinstance(value, int | float)))
    cost = report["cost"]
    taken = f"a score takes {cost['score_us']:.0f} µs, {100 * cost['share']:.1f} % of a draft forward"
    if kind is Trained.VERIFIER:
        taken = f"features {'+'.join(report['features'])}; {taken}; report: {opened.workspace.reports / 'verifier.md'}"
    typer.echo(taken)


def format_metric(value: float) -> str:
    """A figure for the terminal."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def calibrate(pair: Pair = "default", traces: Traces = None, prompts: Source = None, limit: Limit = 24, split: Split = "train",
              column: Column = None, publish: Publish = True, dtype: DtypeOption = None, device: DeviceOption = None,
              threads: Threads = None) -> None:
    """Make acceptance table, correction memory and hardware profile.

    Example: draftwell calibrate --pair default --prompts traffic.jsonl
    """
    from flows import context
    from flows.steps import train as train_step

    rows = load(prompts, limit, split=split, column=column)
    with open_with_progress("calibrate", pair, dtype, device, threads, any_strategy=True) as opened:
        report = train_step.run_calibrate(opened, context.open_trace(opened, traces), rows)
    if publish:
        publish_kinds(opened, *made_by("draftwell calibrate"))
    typer.echo(f"table: {report['accepted']} of {report['judged']} judged tokens accepted  memory: {report['memory_pairs']} pairs  "
               f"draft forward {report['t_draft_ms']:.1f} ms  target forward {report['t_verify_ms']['1']:.1f} ms")
