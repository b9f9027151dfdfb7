"""Online state on disk: written every few seconds and at shutdown, read at the next start.

One file per state in the folder given by `--state-dir`: `everybody.json`, or
`tenant-<digest>.json`. Its first line has the sha256 of the second, which holds counts and numbers,
and names the bundle that they were learnt over. A file that is damaged, of another bundle or of
another schema is not used: one line in the log, and the server starts from the bundle; the next
write takes its place. Each appears by an atomic rename, so that a kill at any moment leaves the
last complete one; remains of a killed write are removed at the next start. A server holds its
folder's lock (`.lock`) while it runs, and another one there is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from draftwell.serving.bundle.bundle import Manifest
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, make_folder, write_atomically
from draftwell.serving.server.model.strategy_pool import EVERYBODY, Learnt, StrategyPool

log = logging.getLogger(__name__)

NAMES = re.compile(r"(everybody|tenant-[0-9a-f]{32})\.json")
SCHEMA, LOCK = 2, ".lock"
LARGEST = 16 << 20
"""Bytes of the largest file that can be a snapshot: a full memory takes less than 2 MB."""
HALF = re.compile(rf"\.{NAMES.pattern}\..+")
STATE_SECONDS = 30.0
"""Between two writes: a server that is killed loses at most what it learnt meanwhile."""


@dataclass(frozen=True)
class SnapshotOrigin:
    """The bundle that state was learnt over.

    Args:
        version: of the release.
        digest: of the bundle's manifest.
        fingerprint: of the pair.
    """

    pair: str
    version: int
    digest: str
    fingerprint: str

    @classmethod
    def of(cls, manifest: Manifest) -> SnapshotOrigin:
        """The origin that a bundle's manifest names."""
        return cls(manifest.pair, manifest.release_version, manifest.digest, manifest.fingerprint)


class Snapshot(BaseModel):
    """The second line of a file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: int
    origin: SnapshotOrigin
    tenant: str
    learnt: Learnt

    @field_validator("schema_version")
    @classmethod
    def is_read_here(cls, version: int) -> int:
        """Refuse another schema."""
        if version != SCHEMA:
            raise ValueError(f"schema {version}, this server reads {SCHEMA}")
        return version


def read_snapshot(path: Path) -> Snapshot:
    """A snapshot, checked.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or of another schema.
    """
    if path.stat().st_size > LARGEST:
        raise ValueError("too large")
    head, _, body = path.read_bytes().partition(b"\n")
    if head != checksum_line(body):
        raise ValueError("sha256 differs")
    try:
        snapshot = Snapshot.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error
    if name_of(snapshot.tenant) != path.name:
        raise ValueError("it belongs to another tenant")
    return snapshot


def checksum_line(body: bytes) -> bytes:
    """The first line of a file, without its end."""
    return json.dumps({"sha256": hashlib.sha256(body.removesuffix(b"\n")).hexdigest()}).encode()


def name_of(tenant: str) -> str:
    """The file of a tenant's state.

    >>> name_of("")
    'everybody.json'
    """
    if tenant == EVERYBODY:
        return "everybody.json"
    return f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}.json"


def first_line(error: Exception) -> str:
    """The first line of an error's text, without the path that an OSError ends with."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


class Snapshots:
    """Keeps a pool's state in a folder.

    Args:
        folder: created if missing.
        every: seconds between two writes.
    Raises:
        DraftwellError: the folder cannot be written to, or is another server's.
    """

    def __init__(self, folder: Path, every: float = STATE_SECONDS):
        self.folder, self.every = folder, every
        self._kept: tuple[StrategyPool, SnapshotOrigin] | None = None
        self._written: dict[str, bytes] = {}  # file name → its first line
        self._saving = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftwell-state", daemon=True)
        self._lock = ExitStack()
        try:
            free = self._lock.enter_context(file_lock(make_folder(folder) / LOCK, wait=False))
            if not free:
                raise DraftwellError(
                    f"another server keeps its state in {folder}: stop it, or name another "
                    "--state-dir for this one",
                    code="state_folder_in_use",
                )
            write_atomically(folder / "everybody.json.try", b"")
            (folder / "everybody.json.try").unlink()
        except OSError as error:
            raise DraftwellError(
                (
                    f"online state cannot be kept in {folder} ({error.strerror}): name another "
                    "--state-dir"
                ),
                code="state_folder_not_writable",
            ) from error
        for path in folder.iterdir():
            if HALF.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def keep(self, pool: StrategyPool, origin: SnapshotOrigin) -> int:
        """`resume`, then `follow`."""
        resumed = self.resume(pool, origin)
        self.follow(pool, origin)
        return resumed

    def resume(self, pool: StrategyPool, origin: SnapshotOrigin) -> int:
        """Let a pool start from what was learnt over its bundle so far; returns the number of
        resumed states."""
        self.save()
        resumed = 0
        with self._saving:
            for snapshot in self._read(origin):
                try:
                    pool.resume(snapshot.tenant, snapshot.learnt)
                    resumed += 1
                except (ValueError, DraftwellError) as error:
                    log.warning(
                        "state in %s does not fit (%s): starting from the bundle",
                        name_of(snapshot.tenant),
                        first_line(error),
                    )
        return resumed

    def follow(self, pool: StrategyPool, origin: SnapshotOrigin) -> None:
        """Keep a pool's state from now on instead of another's, after a switch of bundles."""
        self.save()
        with self._saving:
            self._kept, self._written = (pool, origin), {}

    def start(self) -> None:
        """Start the thread that writes every `every` seconds."""
        self._thread.start()

    def close(self) -> None:
        """Write for the last time; call it when no request runs any more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.save()
        self._lock.close()

    def save(self) -> int:
        """Write changed states and delete those that the pool has dropped; returns the number of
        written files. Never raises."""
        with self._saving:
            try:
                return self._save()
            except OSError as error:
                log.warning(
                    "online state could not be written to the state folder: %s", first_line(error)
                )
                return 0

    def _save(self) -> int:
        if self._kept is None:
            return 0
        pool, origin = self._kept
        if pool.mode == "off":
            return 0
        states, written = pool.learnt(), 0
        for tenant, learnt in states.items():
            snapshot = Snapshot.model_construct(
                schema_version=SCHEMA, origin=origin, tenant=tenant, learnt=learnt
            )
            body = snapshot.model_dump_json().encode() + b"\n"
            head, name = checksum_line(body), name_of(tenant)
            if self._written.get(name) != head:
                write_atomically(self.folder / name, head + b"\n" + body)
                self._written[name] = head
                written += 1
        for path in self._files():
            if path.name not in {name_of(tenant) for tenant in states}:
                path.unlink(missing_ok=True)
        return written

    def _run(self) -> None:
        while not self._ended.wait(self.every):
            self.save()

    def _files(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if NAMES.fullmatch(path.name)]

    def _read(self, origin: SnapshotOrigin) -> list[Snapshot]:
        """The snapshots that fit a bundle, the one written last at the end."""
        found = []
        for path in sorted(self._files(), key=lambda path: path.stat().st_mtime_ns):
            try:
                snapshot = read_snapshot(path)
            except (OSError, ValueError) as error:
                log.warning(
                    "state in %s is damaged (%s): starting from the bundle",
                    path.name,
                    first_line(error),
                )
                continue
            if snapshot.origin != origin:
                log.warning(
                    (
                        "state in %s was learnt over %s version %d, not over this bundle: "
                        "starting from the bundle"
                    ),
                    path.name,
                    snapshot.origin.pair,
                    snapshot.origin.version,
                )
                continue
            found.append(snapshot)
        return found
