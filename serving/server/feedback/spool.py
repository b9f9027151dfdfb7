"""The spool: a folder of recorded requests that monitoring reads (docs/drift.md), written by its
own thread.

Two kinds of files, each complete as soon as it is visible:
`shard-<milliseconds>-<run>-<tenant>.parquet` in the trace schema and, if texts are kept,
`requests-….jsonl` with request bodies, which `draftwell step collect --prompts` reads. Names
sort by
time, `run` is drawn by each server that starts, and a file holds requests of one tenant, which
`draftwell release forget` deletes. Invariants: `offer` never blocks; what does not fit into the
queue is
dropped and counted; the files never take more than `max_bytes`, the oldest are deleted first, and
none gets much older than `days`; a kill leaves at most a hidden temporary file, which a start
removes an hour later.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import make_folder, write_atomically
from draftwell.serving.recording.tenants import TENANT
from draftwell.serving.server.feedback.record import Record, contents
from draftwell.serving.server.settings import FEEDBACK_DAYS

log = logging.getLogger(__name__)

FLUSH_SECONDS = 10.0
BATCH = 32
"""Most records in a shard."""
QUEUE = 64
"""Records that may wait for the writer; one has a few kilobytes."""
OURS = re.compile(rf"(shard|requests)-(\d{{15}})-([0-9a-f]+)(-(?:{TENANT}))?\.(parquet|jsonl)")
HALF = re.compile(rf"\.{OURS.pattern}\..+")
MOST_BYTES = 256 << 20
"""Of the files in a spool; beyond it the oldest go, so that a server may record for ever."""
IDLE_SECONDS = 3600.0
"""After which a spool without records looks for files that have become too old."""
ABANDONED_SECONDS = 3600.0
"""A temporary file older than this is what a killed server left."""


class Spool:
    """Writes records to a folder.

    Args:
        max_bytes: size of all files that servers have written to the folder.
        days: age at which such a file is deleted.
        flush_seconds: longest time that a record waits for others.
        queued: records that may wait for the writer.
        private: only this user may read the files, and the folder if it is created.
    Raises:
        DraftwellError: the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = MOST_BYTES,
        days: float = FEEDBACK_DAYS,
        flush_seconds: float = FLUSH_SECONDS,
        queued: int = QUEUE,
        private: bool = False,
    ):
        self.folder, self.max_bytes, self.flush_seconds = folder, max_bytes, flush_seconds
        self.days, self.private = days, private
        self.counts: Counter[str] = Counter()
        self._queue: queue.Queue[Record | None] = queue.Queue(queued)
        self._last = 0
        # not the process's id: in a container that is 1 for every server
        self._mark = secrets.token_hex(4)
        self._complained: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftwell-feedback", daemon=True)
        self._open(0o700 if private else 0o777)
        self._remove_old()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether `offer` would drop a record now."""
        return self._queue.full()

    def offer(self, record: Record) -> bool:
        """Queue a record, from any thread; False if there is no room, which is counted."""
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
                self._queue.put_nowait(None)  # only wakes the thread
            self._thread.join(timeout)

    def write(self, records: Sequence[Record]) -> None:
        """Write a batch now; failures are counted, and each kind is logged once."""
        # stable: each shard keeps the order in time
        ordered = sorted(records, key=lambda record: record.settings)
        for _, group in groupby(ordered, key=lambda record: record.settings):
            self._write_batch(list(group))
        self._remove_old()

    def _write_batch(self, batch: Sequence[Record]) -> None:
        """Write records of the same settings as one shard."""
        try:
            files = contents(batch)
            stamp, mode = self._stamp(), 0o600 if self.private else 0o644
            for kind, suffix, data in files:
                if data:
                    name = f"{kind}-{stamp:015d}-{self._mark}-{batch[0].tenant}.{suffix}"
                    write_atomically(self.folder / name, data, mode=mode)
                    self.counts["bytes"] += len(data)
            self.counts["written"] += len(batch)
        except Exception as error:
            self.counts["failed"] += len(batch)
            what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._complain(f"feedback could not be written: {what}")

    def _open(self, mode: int) -> None:
        try:
            make_folder(self.folder, mode)
            probe = self.folder / f"shard-{0:015d}-{self._mark}.parquet"
            write_atomically(probe.with_name(f".{probe.name}.probe"), b"")
            probe.with_name(f".{probe.name}.probe").unlink()
        except OSError as error:
            raise DraftwellError(
                (
                    f"feedback cannot be written to {self.folder} ({error.strerror}): name "
                    "another --feedback-dir"
                ),
                code="feedback_folder_not_writable",
            ) from error
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another server has just renamed it
                age = time.time() - path.stat().st_mtime
                if HALF.fullmatch(path.name) and age > ABANDONED_SECONDS:
                    path.unlink()
        self._last = max(
            (
                int(found[2])
                for path in self.folder.iterdir()
                if (found := OURS.fullmatch(path.name))
            ),
            default=0,
        )

    def _run(self) -> None:
        batch: list[Record] = []
        due = 0.0
        while True:
            closing = self._closing.is_set()
            try:
                left = max(0.01, due - time.monotonic()) if batch else IDLE_SECONDS
                wait = 0.0 if closing else left
                record = self._queue.get(timeout=wait) if wait != 0.0 else self._queue.get_nowait()
                if record is not None:
                    due = due if batch else time.monotonic() + self.flush_seconds
                    batch.append(record)
            except queue.Empty:
                due = 0.0
                if not batch:
                    self._remove_old()
            if batch and (len(batch) >= BATCH or time.monotonic() >= due):
                self.write(batch)
                batch = []
            if closing and not batch and self._queue.empty():
                return

    def _stamp(self) -> int:
        """Milliseconds, later than those of every file in the folder, even if the clock goes
        back."""
        self._last = max(int(time.time() * 1000), self._last + 1)
        return self._last

    def _remove_old(self) -> None:
        """Delete the oldest files: those that are too old, and until the others fit."""
        try:
            self._make_room(too_old=int(1000 * (time.time() - self.days * 86_400)))
        except OSError as error:
            self._complain(f"old feedback could not be removed: {error.strerror}")

    def _make_room(self, too_old: int) -> None:
        files = sorted(
            (int(found[2]), path)
            for path in self.folder.iterdir()
            if (found := OURS.fullmatch(path.name))
        )
        sizes = {path: size_of(path) for _, path in files}
        total = sum(sizes.values())
        if late := sum(stamp < too_old for stamp, _ in files):
            log.info("%d files of feedback are older than %g days: deleted", late, self.days)
        for stamp, path in files:
            if total <= self.max_bytes and stamp >= too_old:
                return
            path.unlink(missing_ok=True)
            total -= sizes[path]
            self.counts["removed_files"] += 1
            if stamp >= too_old and "room" not in self._complained:
                self._complained.add("room")
                log.info(
                    "the spool is full (%d bytes): the oldest feedback is deleted", self.max_bytes
                )

    def _complain(self, what: str) -> None:
        if what not in self._complained:  # once: a log line each minute would fill the disk
            self._complained.add(what)
            log.warning("%s", what)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if it has just been deleted."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
