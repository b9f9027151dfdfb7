"""Reading a spool: the folder to which a server adds shards of recorded traffic, each by an atomic
rename.

Shards have the trace schema (`serving/recording/trace.py`). Only the newest are opened; one that
cannot be read is left out and named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from draftwell.components.drift.traffic import COLUMNS, HIDDEN, NEAR
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import sha256_file
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceError, TraceHeader, trace_schema

STAMPED = re.compile(r"shard-(\d{15})-[0-9a-f]+(?:-\w+)?\.parquet")
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
    shards = shards_of(folder)
    columns = [*COLUMNS, *(HIDDEN if hidden else ())]
    tables: list[pa.Table] = []
    read: list[tuple[str, datetime, TraceHeader, str]] = []
    prompts, others, broken, older, empty = set[str](), set[str](), list[TraceError](), False, None
    for path in reversed(shards):
        shard, written = Shard(path, fingerprint), written_at(path)
        try:
            schema = trace_schema(shard.header)
            empty = pa.schema([schema.field(name) for name in columns]).empty_table()
            older = since is not None and written < since
            if older:
                break
            if temperature is not None and abs(shard.header.temperature - temperature) > NEAR:
                others.update(shard.read(["prompt_id"]).column(0).to_pylist())
                continue
            table = shard.read(columns).replace_schema_metadata(None)
            read.append((path.name, written, shard.header, sha256_file(path)))
            tables.append(table)
            prompts.update(table.column("prompt_id").to_pylist())
        except (TraceError, FileNotFoundError) as error:
            if path.exists() and isinstance(error, TraceError):  # a full spool removes the oldest
                broken.append(error)
        if len(prompts) >= window:
            break
    if empty is None:
        again = f"the traces in {folder} are being replaced: run it again"
        raise broken[0] if broken else DraftwellError(again, code="spool_replaced")
    names, dates, headers, digests = zip(*read, strict=True) if read else ((), (), (), ())
    content = "\n".join([str(window), *reversed(digests)])
    rows = pa.concat_tables(tables[::-1]) if tables else empty
    return RecentTraffic(
        newest(rows, window),
        headers,
        hashlib.sha256(content.encode()).hexdigest(),
        names[::-1],
        max(dates, default=None),
        len(others),
        tuple(notes_of(broken, len(shards), others, temperature, since if older else None)),
    )


def shards_of(folder: Path) -> list[Path]:
    """The shards of a spool; an error where there are none (`spool_empty`)."""
    if shards := TraceSet(folder).shards:
        return shards
    raise DraftwellError(
        f"{folder} holds no traces: name a folder of recorded requests to which a server "
        f"writes (--feedback-dir), or `draftwell step collect --set out={folder}`",
        code="spool_empty",
    )


def notes_of(
    broken: Sequence[TraceError],
    shards: int,
    others: Collection[str],
    temperature: float | None,
    since: datetime | None,
) -> Iterator[str]:
    """What was left out, and why."""
    if broken:
        yield f"{len(broken)} of {shards} shards left out: {broken[0]}"
    if others:
        yield (
            f"{len(others)} prompts of the feedback left out: sampled at another temperature than "
            f"{temperature:g}"
        )
    if since is not None:
        yield f"what was recorded before {since:%Y-%m-%d at %H:%M} UTC is left out"


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
