"""A datastore of a trace: the target's own texts, whole, each once; what did not fit is counted;
figures of held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.train.datastore import (
    build_datastore,
    held_out_figures,
    longest_common,
    read_texts,
)
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.recording.trace import TraceSet
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.tiny import table_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    prompts = [
        Prompt(f"p{i}", None, [f"{word} two"])
        for i, word in enumerate(["one", "two", "three", "hello", "world", "word"])
    ]
    return collect_traces(
        table_pair(),
        prompts,
        tmp_path_factory.mktemp("trace"),
        max_tokens=12,
        rollout=2,
        hidden=False,
    )


def rewritten(trace: TraceSet, folder: Path, change: Any) -> TraceSet:
    other = TraceSet(folder)
    other.write_shard(0, change(trace.read()).replace_schema_metadata(trace.read().schema.metadata))
    return other


def targets(trace: TraceSet) -> list[list[int]]:
    """The texts by a plain reading of the rows."""
    found: list[list[int]] = []
    for row in trace.read(["kind", "position", "token"]).to_pylist():
        if row["kind"] == "target":
            if row["position"] == 0:
                found.append([])
            found[-1].append(row["token"])
    return found


def test_it_holds_the_targets_texts_and_no_prompt(trace: TraceSet) -> None:
    store, report = build_datastore(trace, ORIGIN)
    expected = targets(trace)
    assert [text.tolist() for text in read_texts(trace)[1]] == expected
    assert (report.texts, report.tokens, report.left_out) == (6, len(store), 0)
    assert len(store) == sum(map(len, expected))
    assert store.provenance.metrics["tokens"] == len(store)
    assert f"{len(store)} tokens of 6 texts; on held-out prompts" in report.line()
    for text in expected:
        found = store.continuations(text[:4], 4)
        assert found.length == 4, "the text itself is found"
        assert text[4:8] in found.tokens


def test_the_newest_texts_that_fit_are_kept(trace: TraceSet) -> None:
    expected = targets(trace)
    store, report = build_datastore(trace, ORIGIN, most=len(expected[-1]) + len(expected[-2]))
    assert (report.texts, report.left_out) == (2, 4)
    assert store.stream.tolist() == [*expected[-2], -1, *expected[-1], -1]
    assert report.found is not None


def test_a_repeated_prompt_is_not_looked_up_in_its_own_text(tmp_path: Path) -> None:
    """A server gives each request a new id: what counts is what was asked."""
    prompts = [
        Prompt(f"p{i}", None, [f"{word} two"]) for i, word in enumerate(["one", "two", "three"] * 5)
    ]
    names, texts = read_texts(
        collect_traces(table_pair(), prompts, tmp_path, max_tokens=12, rollout=2, hidden=False)
    )
    assert names == ["p0", "p1", "p2"] * 5
    assert len(texts) == 15


def test_a_gap_in_what_was_recorded_ends_a_text(trace: TraceSet, tmp_path: Path) -> None:
    """As in a server's recordings, which hold some of the positions, and perhaps no tokens."""

    def without(rows: pa.Table) -> pa.Table:
        return rows.filter(
            pa.array([position != 3 for position in rows.column("position").to_pylist()])
        )

    pieces = [text.tolist() for text in read_texts(rewritten(trace, tmp_path / "gap", without))[1]]
    assert pieces == [part for text in targets(trace) for part in (text[:3], text[4:]) if part]

    def unknown(rows: pa.Table) -> pa.Table:
        at = rows.schema.get_field_index("token")
        return rows.set_column(at, rows.schema.field(at), pa.nulls(rows.num_rows, pa.int32()))

    with raises_code("no_texts", "draftwell step collect"):
        build_datastore(rewritten(trace, tmp_path / "unknown", unknown), ORIGIN)


def test_a_trace_without_the_targets_texts_is_refused(trace: TraceSet, tmp_path: Path) -> None:
    def others(rows: pa.Table) -> pa.Table:
        at = rows.schema.get_field_index("kind")
        return rows.set_column(at, rows.schema.field(at), pa.array(["draft"] * rows.num_rows))

    with raises_code("no_target_texts"):
        build_datastore(rewritten(trace, tmp_path / "others", others), ORIGIN)


def test_held_out_figures_by_hand() -> None:
    prompts = ["a", "b", "c"]
    texts = [np.array([1, 2, 3, 4]), np.array([1, 2, 3, 9]), np.array([7, 7])]
    # of a's text: after 1 nothing, after 1 2 the draft 3 9 (one right), after 1 2 3 the draft 9
    # (none right)
    assert held_out_figures(prompts, texts) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert held_out_figures(["a", "a"], texts[:2]) == (None, None)
    assert [longest_common([1, 2], text) for text in ([1, 2, 3], [1], [2], [1, 3])] == [2, 1, 0, 1]
