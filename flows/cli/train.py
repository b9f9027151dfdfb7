"""Commands that learn from traces: train, calibrate."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from flows.cli.learning import Column, Publish, Source, Split, Traces, load, publish_kinds, station
from flows.cli.options import DeviceOption, DtypeOption, Limit, Pair, Threads


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
          dtype: DtypeOption = None, device: DeviceOption = None, threads: Threads = None) -> None:
    """Train a SPRINTER verifier, or a SpecDec++ acceptance head, on collected traces.

    Example: draftwell train --pair default
    """
    from flows import stations, training

    with station("train", pair, dtype, device, threads) as opened:
        found = stations.open_trace(opened, traces)
        report = training.train(opened, found) if kind is Trained.VERIFIER else training.train_head(opened, found)
    if publish:
        publish_kinds(opened, kind.value)
    figures = {k: v for k, v in report.items() if isinstance(v, int | float | str)}
    typer.echo("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()))


def calibrate(pair: Pair = "default", traces: Traces = None, prompts: Source = None, limit: Limit = 24, split: Split = "train",
              column: Column = None, publish: Publish = True, dtype: DtypeOption = None, device: DeviceOption = None,
              threads: Threads = None) -> None:
    """Make acceptance table, correction memory and hardware profile.

    Example: draftwell calibrate --pair default --prompts traffic.jsonl
    """
    from flows import stations, training

    rows = load(prompts, limit, split=split, column=column)
    with station("calibrate", pair, dtype, device, threads, any_strategy=True) as opened:
        report = training.calibrate(opened, stations.open_trace(opened, traces), rows)
    if publish:
        publish_kinds(opened, "acceptance_table", "correction_memory", "hardware_profile")
    typer.echo(f"table: {report['accepted']} of {report['judged']} judged tokens accepted  memory: {report['memory_pairs']} pairs  "
               f"draft forward {report['t_draft_ms']:.1f} ms  target forward {report['t_verify_ms']['1']:.1f} ms")
