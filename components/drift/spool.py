"""Reading a spool: the folder to which a server adds shards of recorded traffic, each by an atomic
rename.

Shards have the trace schema (`serving/recording/trace.py`). Only the newest are opened; one that
cannot be read is left out and named.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from draftwell.components.drift.traffic import COLUMNS, HIDDEN, NEAR
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import sha256_file
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceError, TraceHeader, trace_schema

STAMPED = re.compile(r"shard-(\d{15})-\d+\.parquet")
"""A shard that a server wrote, with the milliseconds since 1970."""


@dataclass(frozen=True)
class RecentTraffic:
    """The newest prompts of a spool.

    Args:
        rows: their rows of `COLUMNS` (and `HIDDEN` if asked for), oldest first; none where all were
            at other temperatures.
        headers: of the shards that were read.
        digest: sha256 over these shards.
        shards: their files' names.
        newest: when the newest of them was written; None where none was read.
        others: further prompts that were left out, because they were sampled at another
            temperature.
        notes: what was left out, and why.
    """

    rows: pa.Table
    headers: tuple[TraceHeader, ...]
    digest: str
    shards: tuple[str, ...] = ()
    newest: datetime | None = None
    others: int = 0
    notes: tuple[str, ...] = ()


@dataclass
class _Found:
    """What was read of a spool so far, the newest shard first."""

    columns: list[str]
    tables: list[pa.Table] = field(default_factory=list)
    headers: list[TraceHeader] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    dates: list[datetime] = field(default_factory=list)
    prompts: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    broken: list[TraceError] = field(default_factory=list)
    skipped: TraceHeader | None = None
    """Of a shard that could be read and was left out: its columns are those of an empty answer."""

    def add(self, shard: Shard) -> None:
        """Read a shard; nothing is added where that fails."""
        table = shard.read(self.columns).replace_schema_metadata(None)
        header, digest, date = shard.header, sha256_file(shard.path), written_at(shard.path)
        self.tables.append(table)
        self.headers.append(header)
        self.digests.append(digest)
        self.names.append(shard.path.name)
        self.dates.append(date)
        self.prompts.update(table.column("prompt_id").to_pylist())

    def visit(self, shard: Shard, temperature: float | None, since: datetime | None) -> bool:
        """Read a shard, or leave it out; False where older ones need not be looked at."""
        header = shard.header
        if since is not None and written_at(shard.path) < since:
            self.skipped = header
            return False
        if temperature is not None and abs(header.temperature - temperature) > NEAR:
            self.others.update(shard.read(["prompt_id"]).column(0).to_pylist())
            self.skipped = header
        else:
            self.add(shard)
        return True

    def rows(self, folder: Path) -> pa.Table:
        """All that was read, the oldest first; no rows where everything was left out.

        Raises:
            DraftwellError: nothing could be read.
        """
        if self.tables:
            return pa.concat_tables(self.tables[::-1])
        if self.skipped is not None:
            schema = trace_schema(self.skipped)
            return pa.schema([schema.field(name) for name in self.columns]).empty_table()
        if self.broken:
            raise self.broken[0]
        raise DraftwellError(
            f"the traces in {folder} are being replaced: run it again", code="spool_replaced"
        )


def read_spool(
    folder: Path,
    fingerprint: str,
    *,
    window: int,
    hidden: bool = False,
    temperature: float | None = None,
    since: datetime | None = None,
) -> RecentTraffic:
    """The last `window` prompts of a spool; older shards are not opened.

    Args:
        fingerprint: of the pair; shards of other weights are left out.
        hidden: also the draft's hidden states, most of a trace.
        temperature: that prompts must have been sampled at to count: what cannot be compared must
            not crowd out what can. None takes all.
        since: shards that were written before are left out.
    Raises:
        DraftwellError: the folder holds no shard, or none that can be read.
    """
    shards = TraceSet(folder).shards
    if not shards:
        raise DraftwellError(
            f"{folder} holds no traces: name a folder of recorded requests to which a server "
            f"writes (--feedback-dir), or `draftwell collect --out {folder}`",
            code="spool_empty",
        )
    found, older = _Found([*COLUMNS, *(HIDDEN if hidden else ())]), False
    for path in reversed(shards):
        try:
            older = not found.visit(Shard(path, fingerprint), temperature, since)
        except TraceError as error:
            if path.exists():  # a server whose spool is full removes the oldest
                found.broken.append(error)
        except FileNotFoundError:
            continue
        if older or len(found.prompts) >= window:
            break
    rows, notes = found.rows(folder), list[str]()
    if found.broken:
        notes.append(f"{len(found.broken)} of {len(shards)} shards left out: {found.broken[0]}")
    if found.others:
        notes.append(
            f"{len(found.others)} prompts of the feedback left out: sampled at another "
            f"temperature than {temperature:g}"
        )
    if older:
        notes.append(f"what was recorded before {since:%Y-%m-%d at %H:%M} UTC is left out")
    content = "\n".join([str(window), *reversed(found.digests)])
    return RecentTraffic(
        newest(rows, window),
        tuple(found.headers),
        hashlib.sha256(content.encode()).hexdigest(),
        tuple(reversed(found.names)),
        max(found.dates, default=None),
        len(found.others),
        tuple(notes),
    )


def written_at(path: Path) -> datetime:
    """When a shard was written: what a server put into its name, which a copy keeps, else the
    file's date."""
    stamp = STAMPED.fullmatch(path.name)
    return datetime.fromtimestamp(int(stamp[1]) / 1000 if stamp else path.stat().st_mtime, UTC)


class Shard(TraceSet):
    """One shard as a trace set of its own."""

    def __init__(self, path: Path, fingerprint: str):
        super().__init__(path.parent, fingerprint=fingerprint)
        self.path = path

    @property
    def shards(self) -> list[Path]:
        return [self.path]


def newest(rows: pa.Table, window: int) -> pa.Table:
    """The rows of the `window` prompts that come last; order is kept."""
    ids = list(dict.fromkeys(reversed(rows.column("prompt_id").to_pylist())))
    return (
        rows
        if len(ids) <= window
        else rows.filter(pc.is_in(rows.column("prompt_id"), pa.array(ids[:window])))
    )
