"""A datastore finds what a scan of all texts finds, never crosses from one text into the next, and
survives the disk."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.datastore import (
    END,
    LONGEST,
    MAX_TOKENS,
    WINDOW,
    Continuations,
    Datastore,
    sorted_places,
)
from tests.support.errors import raises_code

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=24), max_size=6)
ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, trace_digest="7" * 64)


def scan(
    texts: list[list[int]], context: list[int], limit: int, longest: int, shortest: int
) -> tuple[int, list[list[int]]]:
    """Length of the longest match and the sorted continuations, by looking at every place."""
    for length in range(min(longest, len(context)), shortest - 1, -1):
        found = [
            text[at + length : at + length + limit]
            for text in texts
            for at in range(len(text) - length)
            if text[at : at + length] == context[len(context) - length :]
        ]
        if found:
            return length, sorted(found)
    return 0, []


@settings(max_examples=100)
@given(
    TEXTS,
    st.lists(st.integers(0, 2), max_size=24),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(3, LONGEST),
)
def test_it_finds_what_a_scan_finds(
    texts: list[list[int]], context: list[int], limit: int, shortest: int, longest: int
) -> None:
    found = Datastore.from_texts(texts).continuations(
        context, limit, longest=longest, shortest=shortest, most=1000
    )
    assert (found.length, sorted(found.tokens)) == scan(texts, context, limit, longest, shortest)


@settings(max_examples=100)
@given(TEXTS)
def test_places_are_sorted_by_the_tokens_from_there_on(texts: list[list[int]]) -> None:
    stream = np.array([token for text in texts if text for token in [*text, END]], dtype=np.int64)
    places = sorted_places(stream).tolist()
    assert places == sorted(
        (i for i in range(len(stream)) if stream[i] != END),
        key=lambda i: (stream[i : i + WINDOW].tolist(), i),
    )


def test_long_repetitions_are_sorted_as_far_as_matches_reach() -> None:
    texts = [[1] * 100 + [2], [1] * 80 + [3]]
    found = Datastore.from_texts(texts).continuations([0] + [1] * 40, 3, most=1000)
    assert (found.length, sorted(found.tokens)) == scan(texts, [0] + [1] * 40, 3, LONGEST, 2)


def test_mutant_that_reads_on_into_the_next_text_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, context = [[1, 2, 3], [4, 5]], [1, 2]
    assert Datastore.from_texts(texts).continuations(context, 4).tokens == [[3]]
    monkeypatch.setattr(
        Datastore,
        "_follow",
        lambda self, place, limit: [
            token for token in self.stream[place:].tolist() if token != END
        ][:limit],
    )
    assert Datastore.from_texts(texts).continuations(context, 4).tokens != [[3]]


def test_a_match_at_the_end_of_a_text_is_none() -> None:
    store = Datastore.from_texts([[7, 8], [8, 9]])
    assert store.continuations([7, 8], 3) == Continuations(0, [])
    assert store.continuations([7, 8], 3, shortest=1) == Continuations(1, [[9]])


def test_of_many_occurrences_a_fair_part_is_looked_at() -> None:
    texts = [[1, 2, 3]] * 300 + [[1, 2, 4]] * 100
    found = Datastore.from_texts(texts).continuations([1, 2], 1, most=40).tokens
    assert (found.count([3]), found.count([4])) == (30, 10)


def test_an_empty_one_matches_nothing(tmp_path: Path) -> None:
    Datastore.empty(ORIGIN).save(tmp_path / "store")
    store = Datastore.load(tmp_path / "store")
    assert (len(store), store.continuations([1, 2, 3], 4)) == (0, Continuations(0, []))


def test_it_is_the_same_after_the_disk(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [[rng.randrange(5) for _ in range(30)] for _ in range(8)]
    store = Datastore.from_texts(texts, ORIGIN)
    digest = store.save(tmp_path / "store")
    loaded = Datastore.load(tmp_path / "store", fingerprint="f" * 64)
    assert (loaded.digest, loaded.provenance) == (digest, ORIGIN)
    assert all(
        loaded.continuations(text[:9], 4) == store.continuations(text[:9], 4) for text in texts
    )
    with raises_code("another_pair"):
        Datastore.load(tmp_path / "store", fingerprint="e" * 64)


def test_what_is_no_datastore_is_refused(tmp_path: Path) -> None:
    with raises_code("no_token_id"):
        Datastore.from_texts([[1, -2]])
    with raises_code("no_token_id"):
        Datastore.from_texts([[2**31]])
    with raises_code("datastore_too_large", f"{MAX_TOKENS:,}"):
        Datastore.from_texts([np.zeros(MAX_TOKENS + 1, dtype=np.int8)])
    stream = np.array([1, 2, END], dtype=np.int32)
    for order in ([0], [0, 3], [-1, 0]):
        with raises_code("bad_artifact", "make it again"):
            Datastore(stream, np.array(order, dtype=np.int32), ORIGIN)
    with raises_code("bad_artifact"):
        Datastore(stream[:2], np.array([0, 1], dtype=np.int32), ORIGIN)
