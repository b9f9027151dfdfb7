"""The station that collects: prompts → traces of the pair."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.stations import Station

if TYPE_CHECKING:
    from components.prompts import Prompt
    from serving.runtime.trace import TraceSet

KINDS = ("bare", "draft", "target", "mixed")
"""SPRINTER's prefix kinds (a) to (d)."""


def collect(station: Station, prompts: Sequence[Prompt], *, max_tokens: int = 96, folder: Path | None = None, fresh: bool = False,
            rollout: int = 16, kinds: Sequence[str] = KINDS) -> TraceSet:
    """Collect traces of the pair on prompts; a collection that was cut short goes on where it stopped.

    Args:
        fresh: forget traces of other prompts or settings in the folder.
        kinds: prefix kinds in equal parts; a verifier learns from all, replay and table from the target's own texts.
    """
    from components.collection import ForeignTrace, forget
    from components.collection import collect as run

    where = folder or station.workspace.traces
    options: dict[str, Any] = {"max_tokens": max_tokens, "rollout": rollout, "prefix_kinds": tuple(kinds), "progress": station.bar}
    try:
        return run(station.pair, prompts, where, **options)
    except ForeignTrace:
        if not fresh:
            raise
        forget(where)
        return run(station.pair, prompts, where, **options)
