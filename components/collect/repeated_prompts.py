"""Which texts of a trace belong to the same prompt: a question asked twice is one prompt, whatever
its ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from draftwell.serving.recording.trace import TraceSet

if TYPE_CHECKING:
    import pyarrow as pa


def first_of_the_same(trace: TraceSet | pa.Table) -> dict[str, str]:
    """id → the first id with the same prompt tokens: a question asked twice is one prompt, which no
    split may divide."""
    owners: dict[tuple[int, ...], str] = {}
    found: dict[str, str] = {}
    for name, tokens in prompts_of(trace):
        owner = owners.setdefault(tokens, found.get(name, name))
        found.setdefault(name, owner)
    return found


def prompts_of(trace: TraceSet | pa.Table) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Id and tokens of the prompt of every text; nothing of a table that lacks a column.

    Bare texts are left out: they contain only the beginning of a prompt, often only that of the
    chat template.
    """
    columns = ["prompt_id", "kind", "prompt_tokens"]
    table = trace.read(columns) if isinstance(trace, TraceSet) else trace
    if not set(columns) <= set(table.column_names):
        return
    first = table.select(columns).filter(table.column("prompt_tokens").is_valid())
    for name, kind, tokens in zip(
        *(first.column(name).to_pylist() for name in columns), strict=True
    ):
        if kind != "bare":
            yield name, tuple(tokens)
