"""What drafters have counted, as plain numbers by name and back: `Strategy.learnt` and
`Strategy.resume`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.runtime.drafting.adaptive import bounded
from draftwell.serving.runtime.drafting.best_drafter import Experience

MOST_COUNTED = 2**53
"""Counts below it are exact as floats."""
LARGEST_GAIN = 1000.0
"""Tokens of plain decoding; a round never gains or loses so many."""


class Counts(Protocol):
    """What requests of one class of temperatures share: of continuations, of a datastore's, and of
    models by role."""

    lookup: AcceptanceTable
    stored: AcceptanceTable
    models: dict[str, Experience]


def below(name: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers with a name before theirs.

    >>> below("head", {"gain": 0.5})
    {'head.gain': 0.5}
    """
    return {f"{name}.{key}": value for key, value in numbers.items()}


def of(name: str, learnt: Mapping[str, float]) -> dict[str, float]:
    """The numbers that `below` put behind a name."""
    return {
        key.removeprefix(f"{name}."): value
        for key, value in learnt.items()
        if key.startswith(f"{name}.")
    }


def table_learnt(table: AcceptanceTable) -> dict[str, float]:
    """The counts of one moment; bins without any are left out."""
    now = table.copy()
    return {
        **below("total", {str(b): count for b, count in enumerate(now.total) if count}),
        **below("accepted", {str(b): count for b, count in enumerate(now.accepted) if count}),
    }


def table_resumed(table: AcceptanceTable, learnt: Mapping[str, float]) -> AcceptanceTable:
    """A table with these counts, and the prior weight of another.

    Raises:
        ValueError: a count is none; ArtifactError: more tokens accepted than judged.
    """
    total, accepted = (
        [
            int(bounded({"count": of(part, learnt).get(str(b), 0)}, "count", 0, MOST_COUNTED))
            for b in range(len(table.total))
        ]
        for part in ("total", "accepted")
    )
    return table.with_counts(total, accepted)


def counts_learnt(counts: Counts) -> dict[str, float]:
    """What was counted, of models as far as any of their rounds was."""
    found = {
        **below("lookup", table_learnt(counts.lookup)),
        **below("stored", table_learnt(counts.stored)),
    }
    for role, seen in counts.models.items():
        if seen.rounds:
            tables = {
                **below("table", table_learnt(seen.table)),
                **below("alternatives", table_learnt(seen.alternatives)),
            }
            found |= below(
                role, {"gain": seen.gain, "ahead": seen.ahead, "rounds": seen.rounds, **tables}
            )
    return found


def resume_counts(counts: Counts, learnt: Mapping[str, float]) -> None:
    """Continue from what `counts_learnt` returned; raises as `table_resumed`."""
    counts.lookup = table_resumed(counts.lookup, of("lookup", learnt))
    counts.stored = table_resumed(counts.stored, of("stored", learnt))
    for role, seen in counts.models.items():
        if known := of(role, learnt):
            seen.gain = bounded(known, "gain", -LARGEST_GAIN, LARGEST_GAIN)
            seen.ahead = bounded(known, "ahead", 0, 1)
            seen.rounds = int(bounded(known, "rounds", 1, MOST_COUNTED))
            seen.table = table_resumed(seen.table, of("table", known))
            seen.alternatives = table_resumed(seen.alternatives, of("alternatives", known))
