"""Commands that learn from data: collect, train, calibrate, tune."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.options import DeviceOption, DtypeOption, Limit, MaxTokens, Pair, Prompts, Threads, pick_device, progress, say, set_threads

if TYPE_CHECKING:
    from components.prompts import Prompt
    from flows.stations import Station

Traces = Annotated[Path | None, typer.Option("--traces", help="Trace folder; the workspace's if left out.")]
Publish = Annotated[bool, typer.Option("--publish/--no-publish", help="Also register what was made in MLflow.")]


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    for command in (collect, train, calibrate, tune):
        app.command()(command)


@contextmanager
def station(title: str, pair: str, dtype: str | None, device: str | None, threads: int | None, *,
            any_strategy: bool = False) -> Iterator[Station]:
    """A loaded pair with a progress bar; `any_strategy` as in `open_station`."""
    from flows.context import open_station

    set_threads(threads)
    opened = open_station(pair, dtype, device=pick_device(device), say=say, any_strategy=any_strategy)
    with progress(title) as bar:
        yield type(opened)(opened.workspace, opened.pair, bar)


def read(prompts: Path | None, limit: int | None) -> list[Prompt]:
    """Prompts of a file, or the shipped ones."""
    from components.prompts import demo_prompts, read_prompts

    return read_prompts(prompts, limit) if prompts else demo_prompts(limit)


def publish_kinds(opened: Station, *kinds: str) -> None:
    """Register artifacts of the workspace."""
    from registry.store import Store

    store = Store()
    for kind in kinds:
        made = store.publish(opened.workspace.artifacts / kind, pair=opened.workspace.spec.name)
        say(f"registered {made.name} version {made.version}")


def collect(pair: Pair = "default", prompts: Prompts = None, limit: Limit = None, max_tokens: MaxTokens = 96,
            out: Annotated[Path | None, typer.Option("--out", help="Trace folder; the workspace's if left out.")] = None,
            fresh: Annotated[bool, typer.Option("--fresh", help="Replace a trace of other prompts or settings.")] = False,
            kinds: Annotated[str, typer.Option("--kinds", help="Prefix kinds, comma-separated; `target` alone is enough to tune.")] = (
                "bare,draft,target,mixed"),
            dtype: DtypeOption = None, device: DeviceOption = None, threads: Threads = None) -> None:
    """Collect traces: the target's own continuations, and how the draft fares along them.

    Example: draftwell collect --pair default --prompts traffic.jsonl --limit 60
    """
    from flows import stations

    rows = read(prompts, limit)
    with station("collect", pair, dtype, device, threads) as opened:
        traces = stations.collect(opened, rows, max_tokens=max_tokens, folder=out, fresh=fresh,
                                  kinds=[k.strip() for k in kinds.split(",") if k.strip()])
    typer.echo(f"{traces.folder}  {traces.read(['position']).num_rows} positions  digest {traces.digest()[:12]}")


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
    from flows import stations

    with station("train", pair, dtype, device, threads) as opened:
        found = stations.open_trace(opened, traces)
        report = stations.train(opened, found) if kind is Trained.VERIFIER else stations.train_head(opened, found)
    if publish:
        publish_kinds(opened, kind.value)
    figures = {k: v for k, v in report.items() if isinstance(v, int | float | str)}
    typer.echo("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()))


def calibrate(pair: Pair = "default", traces: Traces = None, prompts: Prompts = None, limit: Limit = 24, publish: Publish = True,
              dtype: DtypeOption = None, device: DeviceOption = None, threads: Threads = None) -> None:
    """Make acceptance table, correction memory and hardware profile.

    Example: draftwell calibrate --pair default --prompts traffic.jsonl
    """
    from flows import stations

    rows = read(prompts, limit)
    with station("calibrate", pair, dtype, device, threads, any_strategy=True) as opened:
        report = stations.calibrate(opened, stations.open_trace(opened, traces), rows)
    if publish:
        publish_kinds(opened, "acceptance_table", "correction_memory", "hardware_profile")
    typer.echo(f"table: {report['accepted']} of {report['judged']} judged tokens accepted  memory: {report['memory_pairs']} pairs  "
               f"draft forward {report['t_draft_ms']:.1f} ms  target forward {report['t_verify_ms']['1']:.1f} ms")


def tune(pair: Pair = "default", traces: Traces = None, prompts: Prompts = None, limit: Limit = 12, max_tokens: MaxTokens = 64,
         trials: Annotated[int, typer.Option("--trials", min=1, help="Configurations tried by replay.")] = 60,
         lossless_only: Annotated[bool, typer.Option("--lossless-only/--allow-lossy", help="Choose among lossless ones only.")] = True,
         quality_floor: Annotated[float, typer.Option(
             "--quality-floor", min=0, max=1, help="Smallest share of the target's own argmax tokens of a lossy choice.")] = 0.9,
         publish: Publish = True, dtype: DtypeOption = None, device: DeviceOption = None, threads: Threads = None) -> None:
    """Choose strategy and parameters: many by replay, a few by measurement, never slower than autoregressive.

    Example: draftwell tune --pair default --trials 60
    """
    from flows import stations

    rows = read(prompts, limit)
    with station("tune", pair, dtype, device, threads, any_strategy=True) as opened:
        tuned = stations.tune(opened, stations.open_trace(opened, traces), rows, max_tokens=max_tokens, trials=trials,
                              lossless_only=lossless_only, quality_floor=quality_floor)
    if publish:
        publish_kinds(opened, "decoding_config")
    typer.echo(f"chosen: {tuned.strategy} {tuned.parameters}")
    typer.echo(str(tuned.evidence.get("reason", "")))
