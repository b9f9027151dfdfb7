"""Files that a kill, a disk or a person may have damaged: whatever bytes are in one, its reader
gives an error of ours that says what to do, never a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from draftwell.components.results import Results
from draftwell.registry.gates import HERE, GateRecord, load_gates
from draftwell.registry.pairs.catalogue import read_pair
from draftwell.registry.releases import gate_record
from draftwell.serving.bundle.manifest import MANIFEST, Manifest, read_bundle_manifest
from draftwell.serving.bundle.verdict import Check
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import HEADER, TraceHeader, trace_schema
from draftwell.serving.server.model.snapshots import (
    Snapshot,
    SnapshotOrigin,
    checksum_line,
    read_snapshot,
)
from draftwell.serving.server.model.strategy_pool import Learnt

PIECES = [
    b"null",
    b"[]",
    b"{}",
    b"-1",
    b"1e999",
    b"NaN",
    b"9" * 5000,
    b'"\\ud800"',
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"&a [*a]",
    b"!!python/object/apply:os.getcwd []",
    b"? {a: 1}\n: 2\n",
    b"2020-13-45",
    b"\n",
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "\ud800",
    "\x00",
    "../../etc/passwd",
    "x" * 400,
    [],
    [[]],
    [None],
    ["a", 1],
    {},
    {"": None},
    {"a": {"b": []}},
]


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """The bytes of a good file with one to three places cut, overwritten or added to; or any
    bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=60) | st.sampled_from(PIECES))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(good)))
        end = min(len(good), start + draw(st.sampled_from([0, 1, 2, 8, 40, len(good)])))
        piece = draw(st.sampled_from([b"", *PIECES]) | st.binary(max_size=4))
        good = good[:start] + piece + good[end:]
    return good


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


@st.composite
def misshapen(draw: st.DrawFn, good: Any) -> Any:
    """A good JSON value with another in one place of it, or with a place taken out or added."""
    value = copy.deepcopy(good)
    *path, last = draw(st.sampled_from(list(places(value))))
    holder = value
    for key in path:
        holder = holder[key]
    change = draw(st.sampled_from(["put", "take", "add"]))
    if change == "put":
        holder[last] = draw(st.sampled_from(VALUES))
    elif change == "take" or not isinstance(holder, dict):
        del holder[last]
    else:
        holder[draw(st.sampled_from(["", "a", "\ud800"]))] = draw(st.sampled_from(VALUES))
    return value


class Reader(NamedTuple):
    """A good file, and what reads it.

    Args:
        sealed: makes the file of a JSON value, with the digests that belong to it: so that what is
            behind them is reached.
        refuses: the errors that are its contract.
    """

    file: str
    good: bytes
    read: Callable[[Path], Any]
    sealed: Callable[[Any], bytes] = lambda value: json.dumps(value).encode()
    refuses: type[Exception] | tuple[type[Exception], ...] = DraftwellError
    data: Any = None


def manifest() -> Reader:
    data = json.loads(
        Manifest(
            pair="tiny",
            device="cpu",
            dtype="float32",
            fingerprint="f" * 64,
            release_version=3,
            release_digest="d" * 64,
            gated=True,
            versions={"release": 3},
            runs={"release": "r"},
            models={"target": {"source": "local", "weights_sha256": "w" * 64, "folder": "tiny"}},  # type: ignore[dict-item]
            files={"config.json": {"sha256": "c" * 64, "size": 2}},  # type: ignore[dict-item]
        ).to_json()
    )

    def sealed(value: Any) -> bytes:
        if isinstance(value, dict) and "digest" in value:
            rest = {key: part for key, part in value.items() if key != "digest"}
            value = {**rest, "digest": json_digest(rest)}
        return json.dumps(value).encode()

    return Reader(
        MANIFEST, sealed(data), lambda path: read_bundle_manifest(path.parent), sealed, data=data
    )


def snapshot() -> Reader:
    learnt = Learnt(memory=[(1, 2, 3)], strategies={"csd": {"a": 0.5}})
    origin = SnapshotOrigin("tiny", 3, "d" * 64, "f" * 64)
    body = Snapshot(schema_version=2, origin=origin, tenant="", learnt=learnt).model_dump_json()

    def sealed(value: Any) -> bytes:
        line = json.dumps(value).encode() + b"\n"
        return checksum_line(line) + b"\n" + line

    # the server starts from the bundle, with the reason in its log
    return Reader(
        "everybody.json",
        sealed(json.loads(body)),
        read_snapshot,
        sealed,
        (OSError, ValueError),
        json.loads(body),
    )


def record() -> Reader:
    made = GateRecord(
        passed=True,
        checks=(Check("speedup", 1.2, 1.0, True, "1.20 x"),),
        pair="tiny",
        device="cpu",
        release_version=3,
        pins={"verifier": 2},
        created="2026-01-01T00:00:00+00:00",
    ).model_dump_json()

    def read(path: Path) -> Any:
        text = path.read_bytes().decode(errors="replace")
        release: Any = SimpleNamespace(
            published=SimpleNamespace(tags={"gate_record": text}),
            name="release.tiny.cpu",
            pair="tiny",
            device="cpu",
            version=3,
        )
        return gate_record(release)

    return Reader("record", made.encode(), read, data=json.loads(made))


def results() -> Reader:
    """A file of another subject is begun again, and a line that cannot be read is made again."""
    head = {"draftwell": "results", "version": 1, "subject": json_digest("subject")}
    rows = [{"key": "a", "value": {"x": 1.0}}, {"key": "b", "value": {"x": 2.0}}]

    def read(path: Path) -> Any:
        found = Results[dict[str, float]](path, "subject", dict[str, float])
        assert all(isinstance(key, str) and isinstance(row, dict) for key, row in found.items())

    def sealed(value: Any) -> bytes:
        return b"\n".join(json.dumps(line).encode() for line in [head, *value])

    return Reader("results.jsonl", sealed(rows), read, sealed, (), rows)


def trace() -> Reader:
    header = TraceHeader(
        pair="tiny",
        fingerprint="f" * 64,
        dtype="float32",
        rollout=2,
        max_tokens=8,
        temperature=0,
        stop_token_ids=(1,),
    )
    schema = trace_schema(header)

    def sealed(value: Any) -> bytes:
        import io

        buffer = io.BytesIO()
        metadata = {HEADER: json.dumps(value).encode()}
        pq.write_table(schema.with_metadata(metadata).empty_table(), buffer)
        return buffer.getvalue()

    data = json.loads(header.model_dump_json())
    return Reader(
        "shard-00000.parquet",
        sealed(data),
        lambda path: TraceSet(path.parent).header,
        sealed,
        data=data,
    )


def pair() -> Reader:
    data = {
        "name": "mine",
        "description": "a pair",
        "licence": "none",
        "target": {"hub": "org/target"},
        "draft": {"near_copy": {"drop_layers": [3, 4]}},
        "dtype": "float32",
    }
    good = (
        b"name: mine\ndescription: a pair\nlicence: none\ntarget: {hub: org/target}\n"
        b"draft:\n  near_copy: {drop_layers: [3, 4]}\ndtype: float32\n"
    )
    return Reader("pair.yaml", good, read_pair, data=data)


def gates() -> Reader:
    return Reader(
        "gates.yaml",
        (HERE / "gates.yaml").read_bytes(),
        load_gates,
        data=load_gates().model_dump(mode="json"),
    )


READERS = {
    make.__name__: make() for make in (manifest, snapshot, record, results, trace, pair, gates)
}
WHOLE = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def read(reader: Reader, folder: Path, data: bytes) -> None:
    """Read it: what comes of it is a result, or one of the reader's own errors in a line."""
    (folder / reader.file).write_bytes(data)
    refused: Exception | None = None
    try:
        reader.read(folder / reader.file)
    except reader.refuses as error:
        refused = error
    assert not isinstance(refused, DraftwellError) or (refused.code and "\n" not in str(refused))


@pytest.mark.parametrize("name", READERS)
def test_a_good_file_is_read(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    (tmp_path / reader.file).write_bytes(reader.good)
    reader.read(tmp_path / reader.file)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: repr(piece[:12]))
def test_what_parsers_stumble_over_is_read_or_refused_in_a_line(
    name: str, piece: bytes, tmp_path: Path
) -> None:
    good = READERS[name].good
    middle = len(good) // 2
    for data in (piece, good + piece, good[:middle] + piece + good[middle:], b"a: " + piece):
        read(READERS[name], tmp_path, data)


@pytest.mark.parametrize("name", READERS)
@WHOLE
@given(data=st.data())
def test_any_bytes_are_read_or_refused_in_a_line(
    name: str, tmp_path: Path, data: st.DataObject
) -> None:
    reader = READERS[name]
    read(reader, tmp_path, data.draw(damaged(reader.good)))


@pytest.mark.parametrize("name", READERS)
@WHOLE
@given(data=st.data())
def test_a_value_of_another_shape_is_read_or_refused_in_a_line(
    name: str, tmp_path: Path, data: st.DataObject
) -> None:
    """With the digests that belong to it."""
    reader = READERS[name]
    read(reader, tmp_path, reader.sealed(data.draw(misshapen(reader.data))))
