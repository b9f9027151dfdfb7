"""`draftwell collect`: traces of the target's own texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.learning import read, station
from flows.cli.options import DeviceOption, DtypeOption, Limit, MaxTokens, Pair, Prompts, Threads


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(collect)


def collect(pair: Pair = "default", prompts: Prompts = None, limit: Limit = None, max_tokens: MaxTokens = 96,
            out: Annotated[Path | None, typer.Option("--out", help="Trace folder; the workspace's if left out.")] = None,
            fresh: Annotated[bool, typer.Option("--fresh", help="Replace a trace of other prompts or settings.")] = False,
            kinds: Annotated[str, typer.Option("--kinds", help="Prefix kinds, comma-separated; `target` alone is enough to tune.")] = (
                "bare,draft,target,mixed"),
            dtype: DtypeOption = None, device: DeviceOption = None, threads: Threads = None) -> None:
    """Collect traces: the target's own continuations, and how the draft fares along them.

    Example: draftwell collect --pair default --prompts traffic.jsonl --limit 60
    """
    from flows import collecting

    rows = read(prompts, limit)
    with station("collect", pair, dtype, device, threads) as opened:
        traces = collecting.collect(opened, rows, max_tokens=max_tokens, folder=out, fresh=fresh,
                                    kinds=[k.strip() for k in kinds.split(",") if k.strip()])
    typer.echo(f"{traces.folder}  {traces.read(['position']).num_rows} positions  digest {traces.digest()[:12]}")
