"""Traces that no command may learn from, made of a good one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftwell.flows.workspace import TURN
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import HEADER


def contents(*folders: Path) -> dict[str, str]:
    """Every file below some folders with the digest of what it holds, but for who had the turn."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != TURN
    }


def refused(done: Any, *words: str) -> None:
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stdout == ""
    lines = [line for line in done.stderr.strip().splitlines() if line.startswith("Error")]
    assert len(lines) == 1
    assert done.stderr.strip().endswith(lines[0])
    for word in words:
        assert word in lines[0]


def changed(folder: Path, into: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    """A copy of a trace with other rows and the same header."""
    shutil.copytree(folder, into)
    (into / TraceSet.SIDECAR).unlink(missing_ok=True)
    for shard in TraceSet(into).shards:
        table = pq.read_table(shard)
        pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), shard)
    return into


def with_values(table: pa.Table, name: str, values: Any) -> pa.Table:
    place = table.column_names.index(name)
    return table.set_column(
        place, table.schema.field(place), pa.array(values, table.schema.field(place).type)
    )


def with_nan_state(table: pa.Table) -> pa.Table:
    states = [np.array(state, np.float16) for state in table.column("hidden_before").to_pylist()]
    states[7][3] = np.nan
    return with_values(table, "hidden_before", states)


def of_another_pair(table: pa.Table) -> pa.Table:
    header = json.loads(table.schema.metadata[HEADER]) | {
        "pair": "stranger",
        "fingerprint": "e" * 64,
    }
    return table.replace_schema_metadata({HEADER: json.dumps(header).encode()})


def truncated(folder: Path, into: Path) -> Path:
    shutil.copytree(folder, into)
    shard = TraceSet(into).shards[-1]
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size * 2 // 3])
    return into


def holed(folder: Path, into: Path) -> Path:
    """Pages that cannot be read under a footer that can."""
    shutil.copytree(folder, into)
    (into / TraceSet.SIDECAR).unlink(missing_ok=True)
    shard = TraceSet(into).shards[0]
    data = bytearray(shard.read_bytes())
    data[4 : len(data) * 3 // 4] = bytes(len(data) * 3 // 4 - 4)
    shard.write_bytes(bytes(data))
    return into


def foreign(folder: Path, into: Path) -> Path:
    shutil.copytree(folder, into)
    for shard in TraceSet(into).shards:
        pq.write_table(of_another_pair(pq.read_table(shard)), shard)
    return into


BAD: dict[str, tuple[Callable[[Path, Path], Path], tuple[str, ...]]] = {
    "empty": (
        lambda folder, into: changed(folder, into, lambda rows: rows.slice(0, 0)),
        ("no rows", "draftwell step collect"),
    ),
    "no shards": (lambda folder, into: into, ("no traces", "draftwell step collect")),
    "one class": (
        lambda folder, into: changed(
            folder, into, lambda rows: with_values(rows, "ratio", [0.5] * len(rows))
        ),
        ("are acceptable", "collect more prompts"),
    ),
    "another pair": (foreign, ("stranger", "e" * 12, "collect one with this pair")),
    "truncated": (truncated, ("shard-0000", "truncated", "draftwell step collect")),
    "holes": (holed, ("shard-0000", "truncated or no Parquet", "draftwell step collect")),
    "NaN state": (
        lambda folder, into: changed(folder, into, with_nan_state),
        ("NaN", "hidden_before", "collect it again"),
    ),
    "NaN figure": (
        lambda folder, into: changed(
            folder, into, lambda rows: with_values(rows, "entropy", [float("nan")] * len(rows))
        ),
        ("NaN", "entropy", "collect it again"),
    ),
}
