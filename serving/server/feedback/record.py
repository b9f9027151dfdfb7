"""A recorded request, and the bytes of the files that hold several."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwell.serving.recording.tenants import KEYLESS
from draftwell.serving.recording.trace_schema import TraceHeader, trace_schema
from draftwell.serving.runtime.requests import Sampling


@dataclass(frozen=True)
class RecordOrigin:
    """The pair that served a request."""

    pair: str
    fingerprint: str
    dtype: str


@dataclass(frozen=True)
class Record:
    """A recorded request.

    Args:
        id: of its prompt (`draftwell.serving.recording.tenants`).
        positions: one mapping per token of the output, with the columns of the trace schema.
        kind: "target", or `trace.LOSSY` if a lossy strategy generated the text.
        prompt: its tokens; None if texts are not kept: then no position has a token either.
        body: as the client sent it (`messages` or `prompt`) with the `output`; None if texts are
            not kept, or it is unknown.
        tenant: whose request it is.
    """

    id: str
    origin: RecordOrigin
    sampling: Sampling
    kind: str
    positions: Sequence[Mapping[str, Any]]
    prompt: Sequence[int] | None = None
    body: Mapping[str, Any] | None = None
    tenant: str = KEYLESS

    @property
    def settings(self) -> tuple[Any, ...]:
        """What records of one shard have in common."""
        origin, asked = self.origin, self.sampling
        return (
            self.tenant,
            origin.pair,
            origin.fingerprint,
            origin.dtype,
            asked.temperature,
            asked.top_k,
            asked.top_p,
            tuple(sorted(asked.stop_token_ids)),
        )

    def rows(self) -> list[dict[str, Any]]:
        """One row per position."""
        shared = {
            "prompt_id": self.id,
            "turn": 0,
            "kind": self.kind,
            "temperature": self.sampling.temperature,
        }
        made = [{**shared, **position} for position in self.positions]
        if self.prompt is not None:
            made[0].update(prompt_tokens=list(self.prompt), cut_tokens=0)
            if self.kind == "target":
                for row in made:
                    row["target_token"] = row["token"]
        return made


def parquet(records: Sequence[Record]) -> bytes:
    """A shard of records with the same settings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first, longest = records[0], max(len(record.positions) for record in records)
    origin, sampling = first.origin, first.sampling
    header = TraceHeader(
        pair=origin.pair,
        fingerprint=origin.fingerprint,
        dtype=origin.dtype,
        rollout=1,
        rollout_kinds=(),
        max_tokens=longest,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop_token_ids=tuple(sorted(sampling.stop_token_ids)),
    )
    buffer = io.BytesIO()
    rows = [row for record in records for row in record.rows()]
    pq.write_table(
        pa.Table.from_pylist(rows, schema=trace_schema(header)), buffer, compression="zstd"
    )
    return buffer.getvalue()


def contents(records: Sequence[Record]) -> list[tuple[str, str, bytes]]:
    """Kind, suffix and bytes of the files for records with the same settings; a file may be
    empty."""
    return [("shard", "parquet", parquet(records)), ("requests", "jsonl", bodies(records))]


def bodies(records: Sequence[Record]) -> bytes:
    """Request bodies, one per line; empty if no record has one."""
    return "".join(
        json.dumps(record.body, ensure_ascii=False) + "\n"
        for record in records
        if record.body is not None
    ).encode()
