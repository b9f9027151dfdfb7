"""Draft tokens of a round go where they are worth most."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings, strategies as st

from draftwell.serving.server.scheduling.draft_budget import LEAST_KEPT, Drafting, give_out

REQUESTS = st.lists(
    st.builds(
        Drafting, kept=st.floats(0.15, 0.98), seconds=st.just(1.0), longest=st.integers(0, 4)
    ),
    min_size=1,
    max_size=4,
)


def tokens(requests: list[Drafting], lengths: tuple[int, ...]) -> float:
    """Expected tokens that are kept."""
    return sum(
        one.kept**k
        for one, length in zip(requests, lengths, strict=True)
        for k in range(1, length + 1)
    )


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, budget=st.integers(0, 10))
def test_no_other_way_to_give_out_as_many_tokens_is_expected_to_keep_more(
    requests: list[Drafting], budget: int
) -> None:
    given_out = give_out(budget, requests)
    assert sum(given_out) <= budget
    assert all(length <= one.longest for one, length in zip(requests, given_out, strict=True))
    worthy = [
        range(1 + sum(one.kept**k >= LEAST_KEPT for k in range(1, one.longest + 1)))
        for one in requests
    ]
    best = max(tokens(requests, lengths) for lengths in product(*worthy) if sum(lengths) <= budget)
    assert tokens(requests, tuple(given_out)) >= best - 1e-9


def test_requests_whose_drafts_are_kept_more_get_the_longer_ones() -> None:
    lengths = give_out(12, [Drafting(kept, 1.0, longest=8) for kept in (0.9, 0.7, 0.5, 0.3)])
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 3 > lengths[3], "not three for each"
    assert sum(lengths) == 12


def test_where_requests_are_alike_so_are_their_drafts() -> None:
    assert give_out(12, [Drafting(0.7, 1.0, 5.0, "draft", 8)] * 4) == [3] * 4
    assert max(give_out(14, [Drafting(0.7, 1.0, 5.0, "draft", 8)] * 4)) == 4


def test_a_longer_text_makes_a_draft_dearer() -> None:
    short, long = Drafting(0.7, 1.0, longest=8), Drafting(0.7, 2.0, longest=8)
    lengths = give_out(8, [long, short])
    assert lengths[0] < lengths[1]


def test_a_pass_that_nobody_shares_counts_whole() -> None:
    """One request's third token would be kept a little more often than another's first, but needs a
    pass of its own."""
    good, poor = Drafting(0.9, 1.0, 4.0, "draft", 8), Drafting(0.68, 1.0, 4.0, "draft", 8)
    assert good.kept**3 > poor.kept**1
    assert give_out(4, [good, poor]) == [2, 2]
    assert give_out(4, [Drafting(0.9, 1.0, longest=8), Drafting(0.68, 1.0, longest=8)]) == [3, 1]


def test_what_is_hardly_ever_kept_is_not_drafted_though_tokens_are_left() -> None:
    assert give_out(20, [Drafting(0.5, 1.0, longest=16), Drafting(0.05, 1.0, longest=16)]) == [3, 0]
