"""Drafts from continuations: the index finds what a scan finds, the better-scored source wins, and
trees keep to what a request allows."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from draftwell.serving.artifacts.datastore import Continuations, Datastore
from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.drafting.continuations import likeliest_tree
from draftwell.serving.runtime.drafting.datastore_lookup import DatastoreLookup, look_up
from draftwell.serving.runtime.drafting.ngram import NGram
from draftwell.serving.runtime.drafting.suffix import Suffix, SuffixIndex
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.serial import serial_trees
from draftwell.serving.runtime.session.lane import Lane
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.strategies.compose import compose
from draftwell.serving.runtime.trees import ROOT, DraftTree, depths
from tests.support.errors import raises_code
from tests.support.models.enumeration import joint_law, law_error, run_once, true_law
from tests.support.models.resources import table_pair, table_resources


def made(steps: Generator[Any, Any, Any]) -> Any:
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("a lookup needs no forward pass")


def session_of(prompt: list[int], vocab: int = 12, **sampling: Any) -> Session:
    return Session(prompt, Sampling(**{"max_tokens": 64, **sampling}), table_pair(vocab=vocab))


def scan(ids: list[int], limit: int, longest: int, most: int) -> Continuations:
    """As `SuffixIndex.continuations`, by looking at every place."""
    ends = [end for end in range(2, len(ids)) if ids[end - 2 : end] == ids[-2:]][::-1][:most]
    for length in range(min(longest, len(ids)), 1, -1):
        found = [
            end
            for end in ends
            if end >= length and ids[end - length : end] == ids[len(ids) - length :]
        ]
        if found:
            return Continuations(length, [ids[end : end + limit] for end in found])
    return Continuations(0, [])


@settings(max_examples=100)
@given(
    st.integers(2, 6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=6),
)
def test_the_index_finds_what_a_scan_finds(
    longest: int, most: int, limit: int, steps: list[list[int]]
) -> None:
    index, text = SuffixIndex(longest, most), [0]
    for new in steps:
        text += new
        index.extend(text)
        assert index.continuations(limit) == scan(text, limit, longest, most)


class Checked(Suffix):
    """Compares the index with a fresh one before every draft."""

    agrees = True

    def propose(self, session, limit):
        tree = yield from super().propose(session, limit)
        fresh = SuffixIndex()
        fresh.extend(session.text.ids)
        self.agrees = self.agrees and self._index.continuations(4) == fresh.continuations(4)
        return tree


class Early(Checked):
    """Indexes the draft too, before anybody knows what of it stays."""

    def propose(self, session, limit):
        tree = yield from super().propose(session, limit)
        self._index.extend(session.text.ids + tree.tokens)
        return tree


@pytest.mark.parametrize(("kind", "agrees"), [(Checked, True), (Early, False)])
def test_mutant_that_indexes_rejected_tokens_is_caught(kind: type[Checked], agrees: bool) -> None:
    drafter = kind(4.0, 8, 1, 0.0)
    strategy = compose(lambda session: serial_trees(session, drafter, ExactTree()))
    models = table_pair(vocab=3, sharpness=0.5)
    job = run_once(
        strategy, models, [0, 1, 0, 1], Sampling(max_tokens=40, temperature=1.0), Streams(3)
    )
    assert job.session.stats.drafted > job.session.stats.accepted, "something was rejected"
    assert drafter.agrees is agrees


def test_a_drafter_that_meets_another_request_forgets_the_first() -> None:
    drafter = Suffix(4.0, 2, 1, 0.0)
    assert made(drafter.propose(session_of([1, 2, 3, 1, 2]), 2)).tokens == [3, 1]
    assert made(drafter.propose(session_of([4, 5, 1, 6, 4, 5]), 2)).tokens == [1, 6]


def test_counts_by_hand() -> None:
    found = Continuations(3, [[1, 2], [1, 3], [1, 2, 4], [5]])
    tree, score = likeliest_tree(found, 8, levels=3, branches=8)
    assert (tree.tokens, tree.parents) == ([1, 2, 5, 3, 4], [ROOT, 0, ROOT, 0, 1])
    assert score == pytest.approx((3 + 2 + 1 + 1 + 1) / 4)
    assert likeliest_tree(found, 2, levels=3, branches=8)[0].tokens == [1, 2]
    assert likeliest_tree(found, 8, levels=1, branches=8)[0].tokens == [1, 5]
    assert likeliest_tree(found, 8, levels=3, branches=8, least=0.5)[0].tokens == [1, 2]
    assert likeliest_tree(found, 8, levels=3, branches=8, stop={1})[0].tokens == [1, 5]
    chain, _ = likeliest_tree(found, 8, levels=3, branches=1)
    assert chain.is_chain
    assert chain.tokens == [1, 2, 4]
    for nothing in ({"size": 0, "levels": 3}, {"size": 3, "levels": 0}):
        assert not len(likeliest_tree(found, branches=2, **nothing)[0])


@settings(max_examples=80)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=8),
    st.integers(0, 9),
    st.integers(0, 4),
    st.integers(1, 3),
)
def test_a_tree_keeps_to_its_bounds_and_is_of_the_continuations(
    found: list[list[int]], size: int, levels: int, branches: int
) -> None:
    tree, score = likeliest_tree(Continuations(2, found), size, levels=levels, branches=branches)
    assert len(tree) <= size
    assert max(depths(tree.parents), default=0) <= levels
    for node in (ROOT, *range(len(tree))):
        children = [tree.tokens[child] for child in tree.children(node)]
        assert len(set(children)) == len(children) <= branches
    paths = [[tree.tokens[i] for i in tree.path(node)] for node in range(len(tree))]
    assert all(any(tokens[: len(path)] == path for tokens in found) for path in paths)
    assert score == pytest.approx(
        sum(sum(tokens[: len(path)] == path for tokens in found) for path in paths)
        / max(1, len(found))
    )


def test_the_better_scored_source_is_used_and_the_match_bounds_the_draft() -> None:
    session = session_of([1, 2, 3, 4, 9, 1, 2, 5, 1, 2])
    longer = Datastore.from_texts([[2, 5, 1, 2, 7, 7, 7, 7, 7]])
    assert made(Suffix(1.0, 8, 1, 0.1).propose(session, 8)).tokens == [5, 1]
    assert made(Suffix(1.0, 8, 1, 0.1, longer).propose(session, 8)).tokens == [7, 7, 7, 7]
    assert made(Suffix(1.0, 8, 1, 0.1, Datastore.empty()).propose(session, 8)).tokens == [5, 1]
    assert made(Suffix(2.0, 3, 2, 0.1).propose(session, 8)).parents == [ROOT, ROOT, 0]
    assert not len(made(Suffix(1.0, 8, 1, 0.1, longer).propose(session, 0)))


STORE = Datastore.from_texts([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7]])


def test_the_most_frequent_nodes_are_the_tree_and_a_chain_where_trees_are_not_allowed() -> None:
    tree = made(DatastoreLookup(STORE, 4, 10).propose(session_of([1, 2]), 8))
    assert (tree.tokens, tree.parents) == ([5, 3, 6, 7], [ROOT, ROOT, 0, 0])
    chain = made(
        DatastoreLookup(STORE, 4, 10).propose(session_of([1, 2], frequency_penalty=0.5), 8)
    )
    assert (chain.tokens, chain.is_chain) == ([5, 6], True)


def test_a_tree_fits_what_a_server_allows_and_what_the_slot_has_room_for() -> None:
    session = session_of([1, 2])
    session.draft_limit = 2
    assert len(made(DatastoreLookup(STORE, 8, 10).propose(session, session.draft_room(1)))) == 2
    models = table_pair(vocab=12)
    models["target"].max_context = 5
    session = Session([1, 2], Sampling(max_tokens=3), models)
    assert len(made(DatastoreLookup(STORE, 8, 10).propose(session, session.draft_room(1)))) == 3


def test_prompt_lookup_asks_the_datastore_only_where_the_context_has_nothing() -> None:
    def drafted(prompt: list[int]) -> list[int]:
        return made(
            NGram(3, 4, lambda ids, limit: look_up(STORE, ids, limit)).propose(
                session_of(prompt), 4
            )
        ).tokens

    assert drafted([1, 2]) == [5, 6]
    assert drafted([2, 9, 1, 2]) == [9, 1, 2]
    assert drafted([8, 9]) == []
    assert look_up(STORE, [1, 2], 0) == []


def test_a_datastore_that_was_asked_for_must_be_there() -> None:
    without = type(table_resources())({})
    for name, parameters in (("rest", {}), ("prompt_lookup", {"use_datastore": True})):
        with raises_code("artifact_missing", "draftwell step train --kind datastore"):
            next(build_strategy(name, parameters, without).run(session_of([1, 2])))
    for name in ("suffix", "prompt_lookup"):
        next(build_strategy(name, {}, without).run(session_of([1, 2])))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("rest", {"max_depth": 2}), ("suffix", {"alpha": 4.0, "max_branches": 3})],
)
def test_trees_with_alternatives_are_drafted_where_laws_are_enumerated(
    monkeypatch: pytest.MonkeyPatch, name: str, parameters: dict[str, Any]
) -> None:
    """Else `test_lossless.py` would compare chains only."""
    seen: list[bool] = []
    right = Session.verify_tree
    monkeypatch.setattr(
        Session,
        "verify_tree",
        lambda self, tree: (seen.append(tree.is_chain), right(self, tree))[1],
    )
    joint_law(
        lambda: build_strategy(name, parameters, table_resources()),
        table_pair(),
        [0, 1, 0],
        Sampling(max_tokens=3, temperature=1.0),
    )
    assert not all(seen)


def test_mutant_that_drafts_trees_in_spite_of_penalties_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Lane, "trees", property(lambda self: True))
    models, sampling = table_pair(), Sampling(max_tokens=4, temperature=1.0, frequency_penalty=1.5)

    assert (
        law_error(
            lambda: build_strategy("rest", {}, table_resources()), models, [0, 1, 0], sampling
        )
        > 1e-3
    )


def test_an_empty_tree_is_a_plain_step() -> None:
    models = table_pair()
    sampling = Sampling(max_tokens=3, temperature=0.0)
    resources = table_resources(datastore=Datastore.empty())
    law = joint_law(lambda: build_strategy("rest", {}, resources), models, [0, 1], sampling)
    assert law == pytest.approx(true_law(models["target"], [0, 1], sampling))
    assert DraftTree().is_chain
