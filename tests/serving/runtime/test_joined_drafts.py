"""Proposals of different kinds joined into one draft: every token is judged by the distribution
that it was drawn from."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.acceptance.relaxed import could_be_rejected
from draftwell.serving.runtime.drafting.cascade import Cascade
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.ngram import NGram
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.engine.decisions import decide
from draftwell.serving.runtime.logits import Divergence, Span
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.intertwined import intertwined
from draftwell.serving.runtime.schedules.parallel import parallel
from draftwell.serving.runtime.strategies import Strategy
from draftwell.serving.runtime.strategies.compose import compose
from draftwell.serving.runtime.types import Draft
from tests.support.errors import raises_code
from tests.support.models.enumeration import law_error
from tests.support.models.resources import table_pair
from tests.support.models.spans import decided, span_of


def row(*probs: float) -> Span:
    return span_of(torch.tensor([probs]).log(), Sampling(temperature=1.0))


A, B = row(0.6, 0.4), row(0.1, 0.9)


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        (Draft([0]), Draft([1], [A]), [None, A]),
        (Draft([1], [A]), Draft([0, 0]), [A, None, None]),
        (Draft([1], [A]), Draft([0], [B]), [A, B]),
        (Draft([1]), Draft([0]), []),
        (Draft(), Draft([0], [B]), [B]),
        (Draft([0], [B]), Draft(), [B]),
        (Draft([0]) + Draft([1], [A]), Draft([1]), [None, A, None]),
    ],
)
def test_every_token_keeps_its_row(first, second, rows):
    joined = first + second
    assert joined.tokens == first.tokens + second.tokens
    assert joined.rows == rows
    assert [joined.row(i) for i in range(len(joined))] == (rows or [None] * len(joined))
    assert joined[1:].rows == rows[1:]


def test_rules_ask_for_the_row_of_their_token():
    target, draft = (
        span_of(torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(), Sampling(temperature=1.0)),
        Draft([0]) + Draft([1], [B]),
    )
    apart = decide([Divergence("tv", target[i], draft.row(i), i) for i in (0, 1)])
    assert apart == pytest.approx([0.5, 0.4])
    assert decided(could_be_rejected(draft, 0, target))
    likelier = Draft([0]) + Draft([0], [B])
    assert not decided(could_be_rejected(likelier, 1, target)), "p(x) = .5 and q(x) = .1"


def test_confidences_of_one_part_only_are_refused():
    """They would be read as those of other tokens."""
    known = Draft([1], [A], [0.6])
    for first, second in ((known, Draft([0])), (Draft([0]), known)):
        with raises_code("mixed_confidence"):
            _ = first + second
    assert (known + known).confidence == [0.6, 0.6]
    assert (known + Draft()).confidence == (Draft() + known).confidence == [0.6]


def cascade() -> Cascade:
    return Cascade(NGram(1, 1), DraftModel(FixedLength(2)))


def spide_like() -> Strategy:
    ahead = DraftModel(FixedLength(2))
    return compose(
        lambda session: intertwined(
            session, cascade(), ahead, Exact(), lambda k: 2, lambda draft, verdict: None
        ),
        overlaps=True,
    )


def pearl_like() -> Strategy:
    return compose(lambda session: parallel(session, cascade(), Exact(), 2), overlaps=True)


@pytest.mark.parametrize(
    "warpers",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}, {"temperature": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("build", [spide_like, pearl_like])
@pytest.mark.parametrize("seed", [0, 1])
def test_schedules_that_join_n_grams_and_model_drafts_are_lossless(build, warpers, seed):
    """An n-gram's token is judged by its one-hot distribution, not by that of the model's token
    after it."""
    models, sampling = (
        table_pair(seed=seed),
        Sampling(max_tokens=4, stop_token_ids=frozenset({2}), **warpers),
    )

    assert law_error(build, models, [0, 1, 0], sampling) < 1e-6


def test_the_enumeration_sees_the_naive_join(monkeypatch):
    """Lists put behind each other, and repeated to the draft's length: no error, but wrong
    distributions."""

    def naive(self: Draft, other: Draft) -> Draft:
        rows = self.rows + other.rows
        length = len(self) + len(other)
        return Draft(
            self.tokens + other.tokens,
            (rows * length)[:length] if rows else [],
            self.confidence + other.confidence,
        )

    monkeypatch.setattr(Draft, "__add__", naive)
    models, sampling = (
        table_pair(),
        Sampling(max_tokens=4, temperature=1.0, stop_token_ids=frozenset({2})),
    )

    assert law_error(spide_like, models, [0, 1, 0], sampling) > 1e-3
