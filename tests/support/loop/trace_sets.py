"""Small trace sets with every kind of value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceHeader, trace_schema

HEADER = TraceHeader(
    pair="tiny",
    fingerprint="f" * 64,
    dtype="float32",
    rollout=2,
    max_tokens=8,
    temperature=0.0,
    stop_token_ids=(2,),
)


def row(i: int, **changes: Any) -> dict[str, Any]:
    """A row with every kind of value: nulls, lists of several lengths, half floats."""
    return {
        "prompt_id": f"p{i // 3}",
        "task": None if i % 2 else "qa",
        "turn": 0,
        "kind": "target",
        "temperature": 0.0,
        "position": i % 3,
        "prompt_tokens": [1, 2, i] if i % 3 == 0 else None,
        "token": i,
        "target_token": i,
        "target_p": 0.5,
        "confidence": 0.25 + i,
        "candidates": list(range(i % 4)),
        "ratio": float("inf"),
        "hidden_before": [0.5, float(i)] if i % 2 else None,
        "rollout_tokens": [i, i + 1],
        **changes,
    }


def table(rows: list[dict[str, Any]], header: TraceHeader = HEADER) -> pa.Table:
    schema = trace_schema(header)
    return pa.Table.from_pylist(
        [{name: r.get(name) for name in schema.names} for r in rows], schema=schema
    )


def make(folder: Path, shards: list[list[dict[str, Any]]]) -> TraceSet:
    traces = TraceSet(folder)
    for i, rows in enumerate(shards):
        traces.write_shard(i, table(rows))
    return traces
