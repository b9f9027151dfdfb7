"""Trace sets: content digests, atomic shards, and refusals that name the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TRACE_VERSION, TraceError
from tests.support.errors import raises_code
from tests.support.loop.trace_sets import HEADER, make, row, table


def test_rows_come_back_in_order_with_the_header(tmp_path: Path) -> None:
    rows = [row(i) for i in range(7)]
    traces = make(tmp_path, [rows[:3], rows[3:]])
    assert traces.read(["token"]).to_pydict() == {"token": list(range(7))}
    assert traces.read().column("hidden_before").to_pylist() == [r["hidden_before"] for r in rows]
    assert traces.header == HEADER


def test_digest_ignores_cuts_and_encoding_but_sees_every_value(tmp_path: Path) -> None:
    rows = [row(i) for i in range(7)]
    digest = make(tmp_path / "a", [rows]).digest()
    assert make(tmp_path / "b", [rows[:1], rows[1:5], rows[5:]]).digest() == digest
    other = TraceSet(tmp_path / "c")
    (tmp_path / "c").mkdir()
    pq.write_table(
        table(rows), other.shard(0), compression="none", use_dictionary=False, row_group_size=2
    )
    assert other.digest() == digest
    changed = [
        {"token": 99},
        {"task": "qa2"},
        {"prompt_tokens": None},
        {"candidates": [0, 0]},
        {"hidden_before": [0.5, 3.5]},
        {"rollout_tokens": [3, 5]},
        {"hidden_before": None},
    ]
    mutants = [[*rows[:3], row(3, **change), *rows[4:]] for change in changed]
    digests = {make(tmp_path / f"d{i}", [mutant]).digest() for i, mutant in enumerate(mutants)}
    assert len(digests | {digest}) == len(changed) + 1
    assert make(tmp_path / "e", [rows[::-1]]).digest() != digest


def test_list_boundaries_enter_the_digest(tmp_path: Path) -> None:
    first = make(tmp_path / "a", [[row(0, candidates=[1, 2]), row(1, candidates=[3])]])
    second = make(tmp_path / "b", [[row(0, candidates=[1]), row(1, candidates=[2, 3])]])
    assert first.digest() != second.digest()


def test_a_failed_write_leaves_the_old_shard_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = make(tmp_path, [[row(0)]])
    before = traces.shard(0).read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        traces.write_shard(0, table([row(1)]))
    assert traces.shard(0).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["shard-00000.parquet"]


def test_another_pairs_trace_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, [[row(0)]])
    with raises_code(
        "another_pair", "shard-00000.parquet", "pair tiny", "f" * 12, "e" * 12, error=TraceError
    ) as error:
        TraceSet(tmp_path, fingerprint="e" * 64).read()
    assert "\n" not in str(error.value)
    assert TraceSet(tmp_path, fingerprint="f" * 64).read().num_rows == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"rollout": 3},
        {"temperature": 0.7},
        {"fingerprint": "e" * 64},
        {"stop_token_ids": (2, 3)},
        {"batch": 4},
    ],
)
def test_shards_of_different_headers_are_no_trace(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Copied together from two collections; a sidecar's digest of the right ones does not hide
    it."""
    traces = make(tmp_path, [[row(0)], [row(1)]])
    known = traces.digest()
    traces.write_shard(2, table([row(2)], HEADER.model_copy(update=changes)))
    for action in (
        traces.read,
        traces.digest,
        lambda: traces.num_rows,
        lambda: list(traces.batches(["token"])),
    ):
        with raises_code(
            "mixed_traces",
            "shard-00002.parquet",
            f"another {next(iter(changes))} ",
            "shard-00000.parquet",
        ) as error:
            action()
        assert "\n" not in str(error.value)
    traces.shard(2).unlink()
    assert traces.digest() == known


@pytest.mark.parametrize(
    ("version", "code", "remedy"),
    [
        (TRACE_VERSION + 1, "newer_schema", "upgrade draftwell"),
        (TRACE_VERSION - 1, "older_schema", "collect again"),
    ],
)
def test_another_schema_is_refused_even_with_unknown_fields(
    tmp_path: Path, version: int, code: str, remedy: str
) -> None:
    header = HEADER.model_dump_json().replace(
        f'"version":{TRACE_VERSION}', f'"version":{version},"new":1'
    )
    shard = table([row(0)]).replace_schema_metadata({"draftwell.trace": header})
    TraceSet(tmp_path).write_shard(0, shard)
    with raises_code(code, f"schema {version}", f"reads {TRACE_VERSION}", remedy):
        TraceSet(tmp_path).read()


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    traces = make(tmp_path, [[row(0)], [row(i) for i in range(50)]])
    whole = traces.shard(1).read_bytes()
    for keep in (0, 10, len(whole) // 2, len(whole) - 3):
        traces.shard(1).write_bytes(whole[:keep])
        for action in (traces.read, traces.digest):
            with raises_code("unreadable_trace", "shard-00001.parquet"):
                action()


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with raises_code("no_traces", "nowhere", "`draftwell step collect`"):
        TraceSet(tmp_path / "nowhere").read()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "shard-00000.parquet")
    with raises_code("no_trace_header", "shard-00000.parquet"):
        TraceSet(tmp_path).read()


def test_rows_are_read_once_until_a_shard_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that outlived a change would bind artifacts to rows they never saw."""
    traces = make(tmp_path / "a", [[row(0)], [row(1)]])
    reads: list[str] = []
    real = TraceSet._read
    monkeypatch.setattr(
        TraceSet,
        "_read",
        lambda self, path, columns: reads.append(path.name) or real(self, path, columns),
    )
    first = traces.digest()
    assert (traces.digest(), len(reads)) == (first, 2)

    size, date = traces.shard(1).stat().st_size, traces.shard(1).stat().st_mtime_ns
    traces.write_shard(1, table([row(1, target_p=0.25)]))
    os.utime(traces.shard(1), ns=(date, date))
    assert traces.shard(1).stat().st_size == size  # same size and date: only the inode tells
    second = traces.digest()
    assert second == make(tmp_path / "b", [[row(0)], [row(1, target_p=0.25)]]).digest() != first
    traces.write_shard(2, table([row(3)]))
    assert (
        traces.digest() == make(tmp_path / "c", [[row(0), row(1, target_p=0.25), row(3)]]).digest()
    )
    traces.shard(2).unlink()
    assert traces.digest() == second


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"digest": 7}',
        '{"digest": "wrong"}',
        '{"rule": 1, "shards": [], "digest": "wrong"}',
    ],
)
def test_a_broken_sidecar_is_not_believed(tmp_path: Path, text: str) -> None:
    traces = make(tmp_path, [[row(0)]])
    digest = traces.digest()
    (tmp_path / TraceSet.SIDECAR).write_text(text)
    assert traces.digest() == digest
    assert TraceSet(tmp_path).digest() == digest


def test_a_sidecar_of_another_rule_is_not_believed(tmp_path: Path) -> None:
    traces = make(tmp_path, [[row(0)]])
    digest = traces.digest()
    known = json.loads((tmp_path / TraceSet.SIDECAR).read_text())
    (tmp_path / TraceSet.SIDECAR).write_text(
        json.dumps({**known, "rule": known["rule"] + 1, "digest": "wrong"})
    )
    assert traces.digest() == digest


def test_a_known_digest_hides_neither_a_foreign_pair_nor_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = make(tmp_path, [[row(0)]]).digest()
    with raises_code("another_pair", "pair tiny"):
        TraceSet(tmp_path, fingerprint="e" * 64).digest()
    (tmp_path / TraceSet.SIDECAR).unlink()

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr("draftwell.serving.recording.trace.write_atomically", refuse)
    assert TraceSet(tmp_path).digest() == digest
    assert not (tmp_path / TraceSet.SIDECAR).exists()
