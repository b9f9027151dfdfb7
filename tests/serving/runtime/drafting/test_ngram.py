"""Prompt lookup by an index proposes what a scan of the whole context would, whatever is
pending."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from draftwell.serving.runtime.drafting.ngram import NGram, NGramIndex
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft
from tests.support.models.resources import table_pair

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def scan(ids: list[int], max_ngram: int, num_tokens: int) -> list[int]:
    """Tokens after the earliest occurrence of the last n-gram that is not the last itself, n from
    `max_ngram` down to 1."""
    for n in range(min(max_ngram, len(ids) - 1), 0, -1):
        for start in range(len(ids) - n):
            if ids[start : start + n] == ids[-n:]:
                return ids[start + n : start + n + num_tokens]
    return []


def propose(drafter: NGram, session: Session, limit: int, pending: Draft | None) -> list[int]:
    try:
        next(drafter.propose(session, limit, pending))
    except StopIteration as end:
        return end.value.tokens
    raise AssertionError("an n-gram needs no forward pass")


@settings(max_examples=100)
@given(
    st.integers(1, 4),
    st.integers(0, 5),
    st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6),
)
def test_the_index_proposes_what_the_scan_proposes(max_ngram, num_tokens, steps):
    """The text grows by some tokens at a time; others are pending behind it, and gone the next
    time."""
    index, text = NGramIndex(max_ngram), [0]
    for final, pending in steps:
        text += final
        index.extend(text)
        for ids in (text, text + pending):
            assert index.follow(ids, num_tokens) == scan(ids, max_ngram, num_tokens)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), TOKENS, st.integers(0, 4))
def test_the_drafter_asks_it_with_the_text_and_what_is_pending(prompt, pending, limit):
    session = Session(prompt, Sampling(), table_pair(vocab=4))
    assert propose(NGram(3, 3), session, limit, Draft(pending)) == scan(
        prompt + pending, 3, min(limit, 3)
    )
    session.close()


def test_a_drafter_that_meets_another_request_forgets_the_first():
    drafter = NGram(2, 2)
    first, second = (
        Session(prompt, Sampling(), table_pair(vocab=8))
        for prompt in ([1, 2, 3, 1], [4, 5, 1, 6, 4])
    )
    assert propose(drafter, first, 2, None) == [2, 3]
    assert propose(drafter, second, 2, None) == [5, 1]


def test_a_text_is_read_once_however_often_it_is_asked():
    """Tokens that were indexed are not looked at again: the list that is handed over refuses."""

    class Once(list):
        def __getitem__(self, part):
            if (
                isinstance(part, slice)
                and len(self) > 50
                and (part.start or 0) >= 0
                and (part.stop is None)
            ):
                assert len(self) - (part.start or 0) <= 4, "the beginning of the text is read again"
            return super().__getitem__(part)

    index = NGramIndex(3)
    index.extend(list(range(50)))
    text = Once(range(50))
    for token in (7, 8, 9):
        text.append(token)
        index.extend(text)
    assert index.follow(text, 2) == [10, 11]
