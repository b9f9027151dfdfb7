"""`draftwell tune`: the choice of strategy and parameters."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.learning import Publish, Traces, publish_kinds, read, station
from flows.cli.options import DeviceOption, DtypeOption, Limit, MaxTokens, Pair, Prompts, Threads


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(tune)


def tune(pair: Pair = "default", traces: Traces = None, prompts: Prompts = None, limit: Limit = 12, max_tokens: MaxTokens = 64,
         trials: Annotated[int, typer.Option("--trials", min=1, help="Configurations tried by replay.")] = 60,
         lossless_only: Annotated[bool, typer.Option("--lossless-only/--allow-lossy", help="Choose among lossless ones only.")] = True,
         quality_floor: Annotated[float, typer.Option(
             "--quality-floor", min=0, max=1, help="Smallest share of the target's own argmax tokens of a lossy choice.")] = 0.9,
         publish: Publish = True, dtype: DtypeOption = None, device: DeviceOption = None, threads: Threads = None) -> None:
    """Choose strategy and parameters: many by replay, a few by measurement, never slower than autoregressive.

    Example: draftwell tune --pair default --trials 60
    """
    from flows import stations, tuning

    rows = read(prompts, limit)
    with station("tune", pair, dtype, device, threads, any_strategy=True) as opened:
        tuned = tuning.tune(opened, stations.open_trace(opened, traces), rows, max_tokens=max_tokens, trials=trials,
                            lossless_only=lossless_only, quality_floor=quality_floor)
    if publish:
        publish_kinds(opened, "decoding_config")
    typer.echo(f"chosen: {tuned.strategy} {tuned.parameters}")
    typer.echo(str(tuned.evidence.get("reason", "")))
