"""Traces: what a pair did on a set of prompts, one row per committed position, in Parquet shards.

A *text* is a prompt's turn with its continuation, and has one row for each position of the
continuation. The row at position i describes what both models say after `prompt + tokens[:i]`. The
schema is versioned; its metadata binds a shard to the pair that made it. A trace set is a folder of
shards; each appears by an atomic rename or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError

from draftwell.serving.files import write_atomically
from draftwell.serving.recording.trace_digest import file_state, known_digest, update_hashes
from draftwell.serving.recording.trace_schema import (
    HEADER,
    TRACE_VERSION,
    TraceError,
    TraceHeader,
)

if TYPE_CHECKING:
    import pyarrow as pa


class TraceSet:
    """A folder of trace shards.

    Args:
        folder: where the shards are; need not exist before the first is written.
        fingerprint: fingerprint of the pair that the trace shall be of; None skips that check.
    """

    SIDECAR: ClassVar[str] = "digest.json"
    """The digest of the set next to its shards, with the state of the files it was computed
    from."""
    DIGEST_RULE: ClassVar[int] = 1
    """Counted up when the digest is computed in another way, so that no sidecar of the old way is
    believed."""

    def __init__(self, folder: Path, *, fingerprint: str | None = None):
        self.folder, self.fingerprint = Path(folder), fingerprint

    @property
    def shards(self) -> list[Path]:
        """The shards that are complete, in order."""
        return sorted(self.folder.glob("shard-*.parquet"))

    def shard(self, index: int) -> Path:
        """Where a shard is, or will."""
        return self.folder / f"shard-{index:05d}.parquet"

    def write_shard(self, index: int, rows: pa.Table) -> Path:
        """Write a shard, all or nothing; its schema must be that of `trace_schema`."""
        import pyarrow.parquet as pq

        buffer = io.BytesIO()
        pq.write_table(rows, buffer, compression="zstd")
        write_atomically(self.shard(index), buffer.getvalue())
        return self.shard(index)

    @property
    def header(self) -> TraceHeader:
        """What the set was made with.

        Raises:
            TraceError: no shards, or the first one is not fit to be read.
        """
        return self._check(self._present()[0])

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows in order.

        Args:
            columns: names to read, None for all (hidden states are most of a trace).
        Raises:
            TraceError: no shards, or one of them is broken, foreign, of another version, or made
                with other settings.
        """
        import pyarrow as pa

        return pa.concat_tables([self._read(path, columns) for path in self._present()])

    def batches(self, columns: Sequence[str], rows: int = 8192) -> Iterator[pa.Table]:
        """All rows in order, at most `rows` at once, so that a trace need not fit into memory;
        otherwise as `read`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        for path in self._present():
            self._check(path)
            try:
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(rows, columns=list(columns)):
                        yield pa.Table.from_batches([batch])
            except (OSError, pa.ArrowException) as error:
                raise _broken(path) from error

    def read_shard(self, path: Path, columns: Sequence[str]) -> pa.Table:
        """Some columns of one of the shards; otherwise as `read`."""
        return self._read(path, columns)

    def prompt_ids(self) -> list[str]:
        """Ids of all prompts, sorted, each once."""
        return sorted(set(self.read(["prompt_id"]).column(0).to_pylist()))

    @property
    def num_rows(self) -> int:
        """Positions in all shards."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        count = 0
        for path in self._present():
            self._check(path)
            try:
                count += pq.read_metadata(path).num_rows
            except (OSError, pa.ArrowException) as error:
                raise _broken(path) from error
        return count

    def digest(self) -> str:
        """sha256 over all rows in order: the same however they are cut into shards, encoded or
        compressed.

        It is kept in a sidecar file, keyed by the shards' sizes, dates and inodes, so that rows are
        read once; a folder that cannot be written to is only slower.
        """
        import json

        shards = self._present()
        for path in shards:
            self._check(path)
        # Before reading, so that what changes meanwhile is seen the next time.
        key = {"rule": self.DIGEST_RULE, "shards": [file_state(path) for path in shards]}
        sidecar = self.folder / self.SIDECAR
        if (known := known_digest(sidecar, key)) is not None:
            return known
        digest = self._digest(shards)
        with contextlib.suppress(OSError):
            write_atomically(sidecar, json.dumps({**key, "digest": digest}, indent=2).encode())
        return digest

    def _digest(self, shards: Sequence[Path]) -> str:
        hashes: dict[str, Any] = {}
        for path in shards:
            table = self._read(path, None).combine_chunks()
            for name in table.column_names:
                for chunk in table.column(name).chunks:
                    update_hashes(hashes, name, chunk)
        parts = "\n".join(f"{name} {value.hexdigest()}" for name, value in sorted(hashes.items()))
        return hashlib.sha256(parts.encode()).hexdigest()

    def _present(self) -> list[Path]:
        if not self.shards:
            raise TraceError(
                f"{self.folder} holds no trace: collect one with `draftwell step collect`",
                code="no_traces",
            )
        return self.shards

    def _read(self, path: Path, columns: Sequence[str] | None) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._check(path)
        try:
            return pq.ParquetFile(path).read(columns=columns if columns is None else list(columns))
        except (OSError, pa.ArrowException) as error:
            raise _broken(path) from error

    def _check(self, path: Path) -> TraceHeader:
        """The header of a shard that may be read, the same as the first one's."""
        header = _header(path)
        if self.fingerprint is not None and header.fingerprint != self.fingerprint:
            raise TraceError(
                f"{path} is a trace of pair {header.pair} with fingerprint "
                f"{header.fingerprint[:12]}, not "
                f"{self.fingerprint[:12]}: collect one with this pair and dtype",
                code="another_pair",
            )
        first = self._present()[0]
        if path != first and header != (other := _header(first)):
            unlike = next(
                name
                for name in TraceHeader.model_fields
                if getattr(header, name) != getattr(other, name)
            )
            raise TraceError(
                f"{path} has another {unlike} ({getattr(header, unlike)}) than "
                f"{first.name} ({getattr(other, unlike)}): the "
                "shards of a folder are of one collection, put this one elsewhere",
                code="mixed_traces",
            )
        return header


def _header(path: Path) -> TraceHeader:
    """What a shard says of itself."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise _broken(path) from error
    return _parse(path, metadata.get(HEADER, b""))


def _parse(path: Path, raw: bytes) -> TraceHeader:
    import json

    try:
        fields = json.loads(raw)
        version = int(fields["version"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(
            f"{path} is no draftwell trace (no header): give a folder of `draftwell step collect`",
            code="no_trace_header",
        ) from error
    if version > TRACE_VERSION:
        raise TraceError(
            f"{path} has trace schema {version}, this runtime reads {TRACE_VERSION}: upgrade "
            "draftwell",
            code="newer_schema",
        )
    if version < TRACE_VERSION:
        raise TraceError(
            f"{path} has trace schema {version} of an earlier Draftwell, this one reads "
            f"{TRACE_VERSION}: collect again into another folder",
            code="older_schema",
        )
    try:
        return TraceHeader.model_validate(fields)
    except ValidationError as error:
        raise TraceError(
            f"{path} has a damaged trace header: delete this shard and collect again"
        ) from error


def _broken(path: Path) -> TraceError:
    return TraceError(
        (
            f"{path} is truncated or no Parquet file: delete it and run the same `draftwell "
            "step collect` again"
        ),
        code="unreadable_trace",
    )
