"""What the commands that learn from data share: collect, train, calibrate, tune."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.options import pick_device, progress, say, set_threads

if TYPE_CHECKING:
    from components.prompts import Prompt
    from flows.stations import Station

Traces = Annotated[Path | None, typer.Option("--traces", help="Trace folder; the workspace's if left out.")]
Publish = Annotated[bool, typer.Option("--publish/--no-publish", help="Also register what was made in MLflow.")]


@contextmanager
def station(title: str, pair: str, dtype: str | None, device: str | None, threads: int | None, *,
            any_strategy: bool = False, pad_target: float | None = None) -> Iterator[Station]:
    """A loaded pair with a progress bar; `any_strategy` and `pad_target` as in `open_station`."""
    from flows.context import open_station

    set_threads(threads)
    opened = open_station(pair, dtype, device=pick_device(device), say=say, any_strategy=any_strategy, pad_target=pad_target)
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
