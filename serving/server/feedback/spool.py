"""The spool: a folder of served traces that monitoring reads (docs/drift.md), written by a thread of its own.

Two kinds of files, each complete from the moment it can be seen: `shard-<milliseconds>-<pid>.parquet` in the trace schema, and, where
texts are kept, `requests-<milliseconds>-<pid>.jsonl` with request bodies, which `draftwell collect --prompts` reads. Names sort by time.
Invariants: `offer` never blocks; what does not fit (queue, bytes a minute) is dropped and counted; the folder's own files never take
more than `most_bytes`, the oldest go first; a kill leaves at most a hidden temporary file, which the next start removes.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from serving.errors import DraftwellError
from serving.files import write_atomically
from serving.recording.trace_schema import TraceHeader, trace_schema
from serving.runtime.requests import Sampling

log = logging.getLogger(__name__)

FLUSH_SECONDS = 10.0
BATCH = 32
"""Records of a shard, at most."""
QUEUE = 64
"""Records that may wait for the writer; one is some kilobytes."""
OURS = re.compile(r"(shard|requests)-(\d{15})-(\d+)\.(parquet|jsonl)")
HALF = re.compile(r"\.(shard|requests)-(\d{15})-(\d+)\.(parquet|jsonl)\..+")
ABANDONED_SECONDS = 3600.0
"""A temporary file of a process that seems to live is removed all the same when it is older than this."""


@dataclass(frozen=True)
class RecordOrigin:
    """The pair that a record is of."""

    pair: str
    fingerprint: str
    dtype: str


@dataclass(frozen=True)
class Record:
    """A served request.

    Args:
        positions: of its output, each with the names of the trace schema.
        kind: target, or `trace.LOSSY` where a lossy strategy wrote.
        prompt: its tokens; None where texts are not kept, and then no position holds a token either.
        body: as the client sent it (`messages` or `prompt`) with the `output`; None where texts are not kept, or nobody knows it.
    """

    id: str
    origin: RecordOrigin
    sampling: Sampling
    kind: str
    positions: Sequence[Mapping[str, Any]]
    prompt: Sequence[int] | None = None
    body: Mapping[str, Any] | None = None

    @property
    def settings(self) -> tuple[Any, ...]:
        """What records of one shard have in common."""
        origin, asked = self.origin, self.sampling
        return (origin.pair, origin.fingerprint, origin.dtype, asked.temperature, asked.top_k, asked.top_p,
                tuple(sorted(asked.stop_token_ids)))

    def rows(self) -> list[dict[str, Any]]:
        """One row a position."""
        shared = {"prompt_id": self.id, "turn": 0, "kind": self.kind, "temperature": self.sampling.temperature}
        made = [{**shared, **position} for position in self.positions]
        if self.prompt is not None:
            made[0].update(prompt_tokens=list(self.prompt), cut_tokens=0)
            if self.kind == "target":
                for row in made:
                    row["target_token"] = row["token"]
        return made


class Spool:
    """Writes records to a folder.

    Args:
        most_bytes: of all files that servers have written to the folder.
        bytes_a_minute: of what is written; beyond it records are dropped.
        flush_seconds: how long a record waits for others, at most.
        private: what is written, and a folder that is made, are for this user alone.
    Raises:
        DraftwellError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, *, most_bytes: int = 256 << 20, bytes_a_minute: int = 16 << 20, flush_seconds: float = FLUSH_SECONDS,
                 queued: int = QUEUE, private: bool = False):
        self.folder, self.most_bytes, self.bytes_a_minute, self.flush_seconds = folder, most_bytes, bytes_a_minute, flush_seconds
        self.private = private
        self.counts: Counter[str] = Counter()
        self._queue: queue.Queue[Record | None] = queue.Queue(queued)
        self._allowance, self._refilled = float(bytes_a_minute), time.monotonic()
        self._last = 0
        self._complained: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftwell-feedback", daemon=True)
        self._open(0o700 if private else 0o777)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether `offer` would drop a record now."""
        return self._queue.full()

    def offer(self, record: Record) -> bool:
        """Queue a record, from any thread; False, and counted, where there is no room."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.counts["dropped_queue_full"] += 1
            return False
        return True

    def close(self, timeout: float = 10.0) -> None:
        """Write what is queued, and end the thread."""
        self._closing.set()
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)  # only wakes it
            self._thread.join(timeout)

    def write(self, records: Sequence[Record]) -> None:
        """Write a batch now; what goes wrong is counted, and said once."""
        ordered = sorted(records, key=lambda record: record.settings)  # stable: each shard keeps the order of time
        for _, group in groupby(ordered, key=lambda record: record.settings):
            self._write_what_fits(list(group))
        try:
            self._make_room()
        except OSError as error:
            self._complain(f"old feedback could not be removed: {error.strerror}")

    def _write_what_fits(self, batch: Sequence[Record]) -> None:
        """Write records of the same settings as one shard, those of them that the minute's bytes have room for."""
        try:
            files = contents(batch)
            if size_of_all(files) > self._room():
                kept = self._those_that_fit(batch)
                self.counts["dropped_too_fast"] += len(batch) - len(kept)
                self._complain(f"more than {self.bytes_a_minute} bytes a minute: some feedback is dropped; lower --feedback-rate")
                if not kept:
                    return
                batch, files = kept, contents(kept)
            self._allowance -= size_of_all(files)
            stamp, mode = self._stamp(), 0o600 if self.private else 0o644
            for kind, suffix, data in files:
                if data:
                    write_atomically(self.folder / f"{kind}-{stamp:015d}-{os.getpid()}.{suffix}", data, mode=mode)
            self.counts["written"] += len(batch)
            self.counts["bytes"] += size_of_all(files)
        except Exception as error:
            self.counts["failed"] += len(batch)
            what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._complain(f"feedback could not be written: {what}")

    def _those_that_fit(self, batch: Sequence[Record]) -> list[Record]:
        """The first records for which there is room, and of those behind them what is small enough; each is weighed as a shard of its own,
        which is no less than it takes among others."""
        kept, room = [], self._room()
        for record in batch:
            size = size_of_all(contents([record]))
            if size <= room:
                kept.append(record)
                room -= size
        return kept

    def _open(self, mode: int) -> None:
        try:
            self.folder.mkdir(mode, parents=True, exist_ok=True)
            probe = self.folder / f"shard-{0:015d}-{os.getpid()}.parquet"
            write_atomically(probe.with_name(f".{probe.name}.probe"), b"")
            probe.with_name(f".{probe.name}.probe").unlink()
        except OSError as error:
            raise DraftwellError(f"feedback cannot be written to {self.folder} ({error.strerror}): name another --feedback-dir") from error
        for path in self.folder.iterdir():
            if (found := HALF.fullmatch(path.name)) and abandoned(path, int(found[3])):
                path.unlink(missing_ok=True)
        self._last = max((int(found[2]) for path in self.folder.iterdir() if (found := OURS.fullmatch(path.name))), default=0)

    def _run(self) -> None:
        batch: list[Record] = []
        due = 0.0
        while True:
            closing = self._closing.is_set()
            try:
                wait = 0.0 if closing else (max(0.01, due - time.monotonic()) if batch else None)
                record = self._queue.get(timeout=wait) if wait != 0.0 else self._queue.get_nowait()
                if record is not None:
                    due = due if batch else time.monotonic() + self.flush_seconds
                    batch.append(record)
            except queue.Empty:
                due = 0.0
            if batch and (len(batch) >= BATCH or time.monotonic() >= due):
                self.write(batch)
                batch = []
            if closing and not batch and self._queue.empty():
                return

    def _stamp(self) -> int:
        """Milliseconds, later than those of every file that lies there, whatever the clock does."""
        self._last = max(int(time.time() * 1000), self._last + 1)
        return self._last

    def _room(self) -> float:
        """Bytes that may be written now: what is in a bucket that holds a minute's."""
        now = time.monotonic()
        self._allowance = min(float(self.bytes_a_minute), self._allowance + (now - self._refilled) * self.bytes_a_minute / 60)
        self._refilled = now
        return self._allowance

    def _make_room(self) -> None:
        """Remove the oldest files until the others fit."""
        files = sorted((found[2], path) for path in self.folder.iterdir() if (found := OURS.fullmatch(path.name)))
        sizes = {path: size_of(path) for _, path in files}
        total = sum(sizes.values())
        for _, path in files:
            if total <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= sizes[path]
            self.counts["removed_files"] += 1
            if "room" not in self._complained:
                self._complained.add("room")
                log.info("the spool is full (%d bytes): the oldest feedback goes", self.most_bytes)

    def _complain(self, what: str) -> None:
        if what not in self._complained:  # once: a log line each minute would fill the disk
            self._complained.add(what)
            log.warning("%s", what)


def parquet(records: Sequence[Record]) -> bytes:
    """A shard of records with the same settings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first, longest = records[0], max(len(record.positions) for record in records)
    origin, sampling = first.origin, first.sampling
    header = TraceHeader(pair=origin.pair, fingerprint=origin.fingerprint, dtype=origin.dtype, rollout=1, rollout_kinds=(),
                         max_tokens=longest, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
                         stop_token_ids=tuple(sorted(sampling.stop_token_ids)))
    buffer = io.BytesIO()
    rows = [row for record in records for row in record.rows()]
    pq.write_table(pa.Table.from_pylist(rows, schema=trace_schema(header)), buffer, compression="zstd")
    return buffer.getvalue()


def contents(records: Sequence[Record]) -> list[tuple[str, str, bytes]]:
    """Kind, suffix and bytes of the files that records with the same settings become; a file may be empty."""
    return [("shard", "parquet", parquet(records)), ("requests", "jsonl", bodies(records))]


def size_of_all(files: Sequence[tuple[str, str, bytes]]) -> int:
    """Bytes of files that are not written yet."""
    return sum(len(data) for _, _, data in files)


def bodies(records: Sequence[Record]) -> bytes:
    """Request bodies, one a line; nothing where no record has one."""
    return "".join(json.dumps(record.body, ensure_ascii=False) + "\n" for record in records if record.body is not None).encode()


def abandoned(path: Path, pid: int) -> bool:
    """Whether nobody will finish a temporary file: its process has ended, or was the one before this of the same number."""
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    try:
        return time.time() - path.stat().st_mtime > ABANDONED_SECONDS
    except FileNotFoundError:
        return False


def size_of(path: Path) -> int:
    """Bytes of a file, 0 where it has just gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
