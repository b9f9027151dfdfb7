"""Online state on disk: written every few seconds and at the end, read again at the next start.

One file a state in the folder given by `--state-dir`: `everybody.json`, or `tenant-<digest>.json`. Its first line has the sha256 of the
second, which holds counts and numbers, and names the bundle that they were learnt over. A file that is damaged, of another bundle or of
another schema is not used: one line in the log, and the server starts from the bundle; the next write takes its place. Each appears by
an atomic rename, so that a kill at any moment leaves the last whole one; what a killed write left behind is removed at the next start.
One server a folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serving.artifacts.acceptance_table import EDGES
from serving.artifacts.correction_memory import MAX_PAIRS, MOST_SEEN
from serving.bundle.bundle import Manifest
from serving.errors import DraftwellError
from serving.files import write_atomically
from serving.server.model.strategy_pool import EVERYBODY, Learnt, StrategyPool
from serving.server.settings import STATE_SECONDS

log = logging.getLogger(__name__)

SCHEMA = 1
LARGEST = 16 << 20
"""Bytes of a file that may be a snapshot: a full memory takes under 2 MB."""
NAMES = re.compile(r"(everybody|tenant-[0-9a-f]{32})\.json")
HALF = re.compile(r"\.(everybody|tenant-[0-9a-f]{32})\.json\..+")

Count = Annotated[int, Field(ge=0)]


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
        """What a bundle's manifest says."""
        return cls(manifest.pair, manifest.release_version, manifest.digest, manifest.fingerprint)


class Bins(BaseModel):
    """Counts of an acceptance table."""

    model_config = ConfigDict(extra="forbid", strict=True)

    total: list[Count] = Field(min_length=len(EDGES) + 1, max_length=len(EDGES) + 1)
    accepted: list[Count] = Field(min_length=len(EDGES) + 1, max_length=len(EDGES) + 1)

    @model_validator(mode="after")
    def no_more_than_all(self) -> Bins:
        """What is no share would make α larger than 1."""
        if any(accepted > total for accepted, total in zip(self.accepted, self.total, strict=True)):
            raise ValueError("more accepted than judged")
        return self


class Snapshot(BaseModel):
    """The second line of a file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: int
    origin: SnapshotOrigin
    tenant: str
    table: Bins | None
    memory: list[Count] | None = Field(max_length=3 * MAX_PAIRS, description="draft token, correction, count; one after the other")
    strategies: dict[str, dict[str, float]]

    @model_validator(mode="after")
    def in_threes(self) -> Snapshot:
        """A memory's numbers come in threes, each pair once, its count at least 1."""
        numbers = self.memory or []
        pairs = set(zip(numbers[::3], numbers[1::3], strict=False))
        if len(numbers) % 3 or len(pairs) != len(numbers) // 3 or any(not 1 <= count <= MOST_SEEN for count in numbers[2::3]):
            raise ValueError("the memory is no list of different pairs with their counts")
        return self

    @classmethod
    def of(cls, origin: SnapshotOrigin, tenant: str, learnt: Learnt) -> Snapshot:
        """A copy of a state, ready to be written."""
        table = None if learnt.table is None else Bins.model_construct(total=learnt.table[0], accepted=learnt.table[1])
        memory = None if learnt.memory is None else [x for pair, count in learnt.memory.items() for x in (*pair, count)]
        return cls.model_construct(schema_version=SCHEMA, origin=origin, tenant=tenant, table=table, memory=memory,
                                   strategies=learnt.strategies)

    def learnt(self) -> Learnt:
        """The state that this is a copy of."""
        numbers = self.memory
        memory = None if numbers is None else dict(zip(zip(numbers[::3], numbers[1::3], strict=True), numbers[2::3], strict=True))
        return Learnt((self.table.total, self.table.accepted) if self.table else None, memory, self.strategies)


class Snapshots:
    """Keeps a pool's state in a folder.

    Args:
        folder: made if it is not there.
        every: seconds between two looks at what was learnt.
    Raises:
        DraftwellError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, every: float = STATE_SECONDS):
        self.folder, self.every = folder, every
        self._kept: tuple[StrategyPool, SnapshotOrigin] | None = None
        self._written: dict[str, str] = {}  # file name → sha256 of what it holds
        self._saving = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftwell-state", daemon=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "everybody.json.try", b"")
            (folder / "everybody.json.try").unlink()
        except OSError as error:
            raise DraftwellError(f"online state cannot be kept in {folder} ({error.strerror}): name another --state-dir") from error
        for path in folder.iterdir():
            if HALF.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def keep(self, pool: StrategyPool, origin: SnapshotOrigin) -> int:
        """`resume`, and `follow` at once."""
        resumed = self.resume(pool, origin)
        self.follow(pool, origin)
        return resumed

    def resume(self, pool: StrategyPool, origin: SnapshotOrigin) -> int:
        """Let a pool start from what was learnt over its bundle, up to now; returns how many states were resumed."""
        self.save()
        resumed = 0
        with self._saving:
            for snapshot in self._read(origin):
                try:
                    pool.resume(snapshot.tenant, snapshot.learnt())
                    resumed += 1
                except (ValueError, DraftwellError) as error:
                    log.warning("state in %s is not taken (%s): starting from the bundle", name_of(snapshot.tenant), first_line(error))
        return resumed

    def follow(self, pool: StrategyPool, origin: SnapshotOrigin) -> None:
        """Keep a pool's state from now on, in the place of another's: once a switch of bundles is over."""
        self.save()
        with self._saving:
            self._kept, self._written = (pool, origin), {}

    def start(self) -> None:
        """Write from time to time, on a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Write for the last time; call it when no request runs any more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.save()

    def save(self) -> int:
        """Write what has changed, and remove states that the pool has forgotten; returns how many files were written. Never raises."""
        with self._saving:
            try:
                return self._save()
            except OSError as error:
                log.warning("online state could not be written to the state folder: %s", first_line(error))
                return 0

    def _save(self) -> int:
        if self._kept is None:
            return 0
        pool, origin = self._kept
        if pool.mode == "off":
            return 0
        states, written = pool.learnt(), 0
        for tenant, learnt in states.items():
            body = Snapshot.of(origin, tenant, learnt).model_dump_json().encode()
            digest, name = hashlib.sha256(body).hexdigest(), name_of(tenant)
            if self._written.get(name) != digest:
                write_atomically(self.folder / name, json.dumps({"sha256": digest}).encode() + b"\n" + body + b"\n")
                self._written[name] = digest
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
                log.warning("state in %s is damaged (%s): starting from the bundle", path.name, first_line(error))
                continue
            if snapshot.origin != origin:
                log.warning("state in %s was learnt over %s version %d, not over this bundle: starting from the bundle", path.name,
                            snapshot.origin.pair, snapshot.origin.version)
                continue
            found.append(snapshot)
        return found


def read_snapshot(path: Path) -> Snapshot:
    """A snapshot, checked.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or of another schema.
    """
    if path.stat().st_size > LARGEST:
        raise ValueError("too large")
    head, _, rest = path.read_bytes().partition(b"\n")
    body = rest.removesuffix(b"\n")
    try:
        told = json.loads(head)["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("it has no sha256") from error
    if told != hashlib.sha256(body).hexdigest():
        raise ValueError("sha256 differs")
    if (version := json.loads(body).get("schema_version")) != SCHEMA:
        raise ValueError(f"schema {version}, this server reads {SCHEMA}")
    try:
        snapshot = Snapshot.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from error
    if name_of(snapshot.tenant) != path.name:
        raise ValueError("it belongs to another tenant")
    return snapshot


def name_of(tenant: str) -> str:
    """The file of a tenant's state.

    >>> name_of("")
    'everybody.json'
    """
    return "everybody.json" if tenant == EVERYBODY else f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}.json"


def first_line(error: Exception) -> str:
    """The first line of an error's text, without the path that an OSError ends with."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
