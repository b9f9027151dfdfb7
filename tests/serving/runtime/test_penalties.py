"""Penalties counted from forward pass to forward pass equal those counted afresh, whatever is
drafted and rejected between."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings, strategies as st

from draftwell.serving.runtime import penalties as module
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.resources import table_pair

VOCAB = 5
PROMPT = [4, 1]
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


def plainly(logits: torch.Tensor, sampling: Sampling, written: list[int]) -> torch.Tensor:
    """Each row by itself, by the tokens before the one that it predicts."""
    found = logits.clone()
    for row in range(len(logits)):
        length = len(written) - (len(logits) - 1 - row)
        before = written[: max(0, length)]
        for token in {*PROMPT, *before}:
            found[row, token] *= (
                sampling.repetition_penalty
                if found[row, token] < 0
                else 1 / sampling.repetition_penalty
            )
        for token, count in Counter(before).items():
            found[row, token] -= sampling.presence_penalty + sampling.frequency_penalty * count
        # a row before the output predicts a token of the prompt
        if 0 <= length < sampling.min_tokens:
            found[row, [*sampling.stop_token_ids]] = -torch.inf
    return found


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 6), TOKENS, st.integers(1, 5)), min_size=1, max_size=8),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.sampled_from([1.0, 0.5, 1.3]),
    st.integers(0, 8),
)
def test_they_equal_a_count_of_the_whole_text_at_every_pass(
    steps, presence, frequency, repetition, least
):
    """A step takes tokens back (rejected), adds others, and asks for some rows: also for more than
    there are tokens."""
    sampling = Sampling(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        min_tokens=least,
        stop_token_ids=frozenset({0, 3}),
    )
    kept, written = Penalties(sampling, PROMPT), []
    for number, (back, more, rows) in enumerate(steps):
        written = written[: max(0, len(written) - back)] + more
        logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(number))
        before = logits.clone()
        torch.testing.assert_close(
            kept.follow(written).apply(logits),
            plainly(logits, sampling, written),
            atol=1e-6,
            rtol=0,
        )
        assert torch.equal(logits, before), "the model's own logits stay"


def test_another_text_of_the_same_length_is_counted_anew():
    kept = Penalties(Sampling(frequency_penalty=1.0)).follow([1, 2, 3])
    assert kept.follow([1, 4, 3]).apply(torch.zeros(1, VOCAB)).tolist() == [[0, -1, 0, -1, -1]]


class Unlisted(Counter[int]):
    """Counts that nobody goes through."""

    def items(self):
        raise AssertionError("a pass goes through all tokens of the text")

    __iter__ = items


def test_a_pass_looks_at_what_is_new_only():
    kept = Penalties(Sampling(repetition_penalty=2.0), PROMPT)
    kept.follow([1, 2, 3]).apply(torch.ones(1, VOCAB))
    kept._counts = Unlisted({1: 1, 2: 1, 3: 1})
    assert kept.follow([1, 2, 0]).apply(torch.ones(2, VOCAB)).tolist() == [
        [1, 0.5, 0.5, 1, 0.5],
        [0.5, 0.5, 0.5, 1, 0.5],
    ]


@pytest.mark.parametrize("name", ["autoregressive", "vanilla_sd"])
def test_a_request_counts_each_token_once_for_each_model_and_uncounts_what_was_rejected(
    monkeypatch, name
):
    """Counting the text at every pass, as though nothing were known, is quadratic in its length."""
    counted = Counter()

    class Watched(Counter):
        def update(self, tokens=(), **more):
            counted["tokens"] += len(tokens or ())
            super().update(tokens, **more)

    monkeypatch.setattr(module, "Counter", Watched)
    sampling = Sampling(max_tokens=200, temperature=1.0, frequency_penalty=0.1)
    job = Engine(table_pair(vocab=8)).generate([1, 2], sampling, build_strategy(name))
    stats = job.session.stats
    assert counted["tokens"] <= 2 * (200 + stats.drafted)
