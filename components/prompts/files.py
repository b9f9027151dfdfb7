"""Files of prompts as rows, one at a time: JSONL, JSON, CSV, text, logs of vLLM, Parquet, Arrow,
and folders of these.

What a file is, is seen from its first bytes; its name only tells tables and texts apart. A row that
cannot be read is given as the error in its place, so that it costs no other row.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice, product
from pathlib import Path
from typing import IO, Any

from draftwell.components.prompts.layouts import KEYS, literal
from draftwell.components.prompts.messages import NoPrompt
from draftwell.serving.errors import DraftwellError

Row = Mapping[str, Any]
Placed = tuple[str, Row | NoPrompt]
"""`line 3` or `row 2`, and the row, or what is wrong with it."""

SUFFIXES = (
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".arrow",
    ".json",
    ".csv",
    ".tsv",
    ".log",
    ".txt",
    ".md",
)
"""Of the files that a folder is read for: those of the first suffix that it has. The last three,
texts, count only where it and the folders within have no other."""
ABOUT = re.compile(
    r"(.*/)?(\..*|(readme.*|licen[cs]e|notice|changelog|requirements)\.(md|txt)"
    r"|(dataset_infos?|croissant)\.json)",
    re.IGNORECASE,
)
"""Files in a folder that are hidden, or describe a data set."""
JSONL = (".jsonl", ".ndjson")
CELLS = (".csv", ".tsv", ".parquet", ".arrow")
"""Tables, in whose texts JSON is a conversation."""
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
GZIP, PARQUET, ARROW = b"\x1f\x8b", b"PAR1", b"ARROW1"
EXAMPLE = 'such as {"prompt": "Hello"}'
CHUNK, LONGEST = 1 << 20, 1 << 27
"""Characters that are read at once, and of the longest value in an array."""
BETWEEN = re.compile(r"[\s,\]]*")
LOG_LINE = re.compile(r"\b(INFO|DEBUG|WARNING) \d\d-\d\d \d\d:\d\d:\d\d")
PIECE = r"""(None|'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")"""
LOGGED = re.compile(
    rf"Received request (\S+): prompt: {PIECE}, .*?(?:prompt_token_ids: (\[[\d, ]*\]|None)|$)"
    rf"|Request (\S+) details: prompt: {PIECE}, prompt_token_ids: (\[[\d, ]*\]|None)"
)
"""vLLM's lines about a request, up to 0.9 at INFO and later at DEBUG."""


def suffix_of(path: Path) -> str:
    """A file's suffix without that of its compression, in lower case."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def files_in(folder: Path, split: str = "train") -> list[Path]:
    """The files of prompts in a folder, of one kind, in the order of their names; where it has
    none, those in the folders within, as a data set of the hub is stored.

    Args:
        split: files whose name begins with it are taken alone, where there are any.
    """
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    files = [folder / name for name in names if not ABOUT.fullmatch(name.as_posix())]
    here = [path for path in files if path.parent == folder]
    for suffixes in (SUFFIXES[:-3], SUFFIXES[-3:]):
        for there, suffix in product((here, files), suffixes):
            if found := [path for path in there if suffix_of(path) == suffix]:
                return [path for path in found if path.name.startswith(f"{split}-")] or found
    return []


def rows_of(path: Path, *, growing: bool = False) -> Iterator[Placed]:
    """The rows of a file.

    Args:
        growing: it is still being written: a last line without its end is left out.
    Raises:
        DraftwellError: it cannot be read, or not to its end; one line.
    """
    with opened(path) as file:
        head = file.peek(4096)[:4096]  # type: ignore[attr-defined]
        suffix = suffix_of(path)
        if head.startswith((PARQUET, ARROW)) or suffix in (".parquet", ".arrow"):
            yield from _columns(path)
            return
        encoding = MARKS.get(head[:2])
        if encoding is None and b"\0" in head and (suffix not in SUFFIXES or b"\0\0" in head):
            raise DraftwellError(
                f"{path} is binary: name a file of JSON, CSV, Parquet, Arrow or text",
                code="unreadable_source",
            )
        start = head.removeprefix(codecs.BOM_UTF8).lstrip()
        if suffix in (".csv", ".tsv"):
            with text_of(file, encoding) as text:
                yield from _cells(path, text, suffix)
        elif (
            start[:1] in (b"{", b"[")
            and encoding is None
            and not spans_lines(start, one_a_line=growing or suffix in JSONL)
        ):
            yield from _lines(file, growing=growing)
        elif start[:1] in (b"{", b"[") or (encoding and suffix.startswith(".js")):
            with text_of(file, encoding) as text:
                yield from _values(text)
        elif suffix in (".txt", ".log", ".md"):
            with text_of(file, encoding) as text:
                yield from _texts(text, log=suffix == ".log")
        else:
            yield from _lines(file, growing=growing)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed.

    Raises:
        DraftwellError: it is not there, no file, or damaged; one line.
    """
    try:
        with path.open("rb") as plain:
            zipped = path.suffix == ".gz" or plain.peek(2)[:2] == GZIP
            with gzip.open(plain) if zipped else plain as file:
                yield file  # type: ignore[misc]
    except FileNotFoundError as error:
        raise DraftwellError(
            f"there is no prompt file {path}: check the path", code="no_such_source"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DraftwellError(
            f"{path} is no complete gzip file: compress it again or give the plain .jsonl",
            code="bad_gzip",
        ) from error
    except OSError as error:
        raise DraftwellError(
            f"cannot read prompt file {path}: {error.strerror or error}", code="unreadable_source"
        ) from error


def text_of(file: IO[bytes], encoding: str | None) -> io.TextIOWrapper:
    """A file's text; bytes of another encoding become halves of characters, which are refused with
    their row."""
    errors = "replace" if encoding else "surrogateescape"
    return io.TextIOWrapper(file, encoding or "utf-8-sig", errors=errors, newline="")


def spans_lines(start: bytes, *, one_a_line: bool) -> bool:
    """Whether a JSON value continues after its first line, or may be an array of very many rows.

    Args:
        one_a_line: the file's name says that it does not, so that a broken first line is one row.
    """
    first, _, more = start.partition(b"\n")
    first = first.rstrip()
    if not more:
        return first.startswith(b"[")
    if one_a_line:
        return first in (b"{", b"[") or (first.startswith(b"[") and first.endswith(b","))
    return first[-1:] not in (b"}", b"]")


def _lines(file: Iterable[bytes], *, growing: bool) -> Iterator[Placed]:
    """Lines of JSON objects."""
    for number, raw in enumerate(file, 1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            whole = raw.endswith(b"\n") or error.reason != "unexpected end of data"
            if whole or not growing:
                yield f"line {number}", NoPrompt("not UTF-8: save it as UTF-8")
            continue
        if line.strip():
            found = read_line(line)
            if isinstance(found[0], Mapping) or line.endswith("\n") or not growing:
                yield from ((f"line {number}", row) for row in found)


def read_line(line: str) -> list[Row | NoPrompt]:
    """The rows of a line of JSON, mostly one, or what is wrong with it."""
    try:
        return rows_in(json.loads(line))
    except (ValueError, RecursionError):
        return [NoPrompt(f"not valid JSON: write one object a line, {EXAMPLE}")]


def rows_in(value: Any) -> list[Row | NoPrompt]:
    """The rows that a JSON value holds: itself, those of a list, or those that an API returned."""
    if isinstance(value, Mapping) and value.keys().isdisjoint(KEYS):
        listed = value.get("data") or value.get("rows")
        if isinstance(listed, list) and any(isinstance(one, Mapping | list) for one in listed):
            return [row for one in listed for row in rows_in(one)]
        if isinstance(row := value.get("row"), Mapping):
            return [row]
    if isinstance(value, Mapping):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        roles = not value[0].keys().isdisjoint(("role", "from"))
        return [{"messages": value}] if roles else list(value)
    return [NoPrompt(f"not a JSON object: write one {EXAMPLE}")]


def _values(file: IO[str]) -> Iterator[Placed]:
    """The elements of a JSON array, or JSON values one after the other, without holding all."""
    decode = json.JSONDecoder().raw_decode
    text, index, wanted, more = file.read(CHUNK).lstrip(), 0, CHUNK, True
    place = int(text.startswith("["))
    ended = not place
    while True:
        between = BETWEEN.match(text, place)
        assert between is not None  # it may be empty
        place, ended = between.end(), ended or "]" in between[0]
        value: Any = None
        try:
            value, end = decode(text, place)
        except (ValueError, RecursionError):
            end = len(text)
        if end == len(text) and more and end - place < LONGEST:  # it may go on
            read = file.read(wanted)
            more, text, place, wanted = bool(read), text[place:] + read, 0, 2 * wanted
            continue
        if value is None:
            if place < len(text):
                yield f"row {index}", NoPrompt("not valid JSON: nothing after it can be read")
            elif not ended:
                yield f"row {index}", NoPrompt("the file ends before its array: fetch it again")
            return
        for row in rows_in(value):
            yield f"row {index}", row
            index += 1
        place, wanted = end, CHUNK


def _cells(path: Path, file: IO[str], suffix: str) -> Iterator[Placed]:
    """Rows of a CSV file, whose first line names the columns and shows what parts them."""
    csv.field_size_limit(sys.maxsize)
    first = file.readline()
    parts = max(",;\t", key=first.count) if suffix == ".csv" else "\t"
    try:
        for index, row in enumerate(csv.DictReader(chain([first], file), delimiter=parts)):
            more = None in row  # cells without a column
            yield f"row {index}", NoPrompt("it has more cells than the header") if more else row
    except csv.Error as error:
        raise DraftwellError(
            f"{path} is no CSV file in UTF-8 ({error}): save it again", code="unreadable_source"
        ) from error


def _texts(file: Iterable[str], *, log: bool) -> Iterator[Placed]:
    """Lines of a text as prompts; of a log, the requests in it."""
    lines = iter(file)
    head = list(islice(lines, 200))
    log = log or any(LOG_LINE.search(line) for line in head)
    for number, line in enumerate(chain(head, lines), 1):
        if not log and line.strip():
            yield f"line {number}", {"prompt": line.rstrip("\r\n")}
        elif log and (said := LOGGED.search(line)) is not None:
            name, text, ids = (said[i] or said[i + 3] for i in (1, 2, 3))
            try:
                prompt = literal(ids if ids and text == "None" else text)
            except (ValueError, SyntaxError):  # of `\x`, or cut off
                yield f"line {number}", NoPrompt("its prompt is no text in quotes of Python")
                continue
            yield f"line {number}", {"id": name, "prompt": prompt, "raw": True}


def _columns(path: Path) -> Iterator[Placed]:
    """Rows of a Parquet or an Arrow file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        index = 0
        for batch in _batches(path, pa, pq):
            for row in _batch_rows(batch):
                yield f"row {index}", row
                index += 1
    except (OSError, pa.ArrowException) as error:
        raise DraftwellError(
            f"{path} is truncated or no Parquet file: fetch or save it again",
            code="unreadable_source",
        ) from error


def _batches(path: Path, pa: Any, pq: Any) -> Iterator[Any]:
    with path.open("rb") as file:
        kind = file.read(8)
    if kind.startswith(PARQUET):
        yield from pq.ParquetFile(path).iter_batches(batch_size=256)
    elif kind.startswith(ARROW):
        reader = pa.ipc.open_file(path)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    elif suffix_of(path) == ".arrow":
        yield from pa.ipc.open_stream(path)
    else:
        raise pa.ArrowInvalid("no Parquet file")


def _batch_rows(batch: Any) -> Iterator[Row | NoPrompt]:
    try:
        yield from map(without_nulls, batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            yield NoPrompt("not UTF-8: save it as UTF-8")
            return
        for i in range(batch.num_rows):
            yield from _batch_rows(batch.slice(i, 1))


def without_nulls(row: Row) -> Row:
    """A row of a table, whose objects have every key that any row's have: without those that are
    null in it."""
    return {key: _kept(value) for key, value in row.items()}


def _kept(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _kept(one) for key, one in value.items() if one is not None}
    return [_kept(one) for one in value] if isinstance(value, list) else value
