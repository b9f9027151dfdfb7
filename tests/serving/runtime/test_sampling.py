"""Warping, residuals, and the separation of random streams."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from draftwell.serving.errors import InvalidRequest, NotFinite
from draftwell.serving.runtime.acceptance.divergence import DivergenceName, divergence
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.random_streams import RandomStream, Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import (
    adjusted,
    inverted,
    nucleus,
    residual,
    warp,
)
from tests.support.errors import raises_code
from tests.support.models.spans import all_rows, sampled, span_of

LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12).map(torch.tensor)
DISTINCT = st.lists(st.integers(-800, 800), min_size=2, max_size=12, unique=True).map(
    lambda values: torch.tensor(values) / 100
)
"""Logits without ties: which of two equal tokens top-k and top-p keep is nobody's promise."""


@settings(max_examples=60, deadline=None)
@given(DISTINCT, st.floats(0.1, 2.0), st.integers(0, 5), st.floats(0.05, 1.0))
def test_warped_probabilities_agree_with_transformers(logits, temperature, top_k, top_p):
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    mine = warp(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    expected = theirs(None, logits[None].clone())[0].softmax(-1)
    kept = (logits.sort(descending=True).values / temperature)[: top_k or None]
    # rounding decides there whether a token is kept
    assume(top_p == 1.0 or not ((kept.softmax(-1).cumsum(-1) - top_p).abs() < 1e-5).any())
    assert float(mine.sum()) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)


def test_temperature_zero_is_one_hot_but_confidence_is_not():
    rows = span_of(torch.tensor([[1.0, 2.0, 0.0]]), Sampling())
    warm = span_of(torch.tensor([[1.0, 2.0, 0.0]]), Sampling(temperature=1.0))
    assert rows.probs(0).tolist() == [0.0, 1.0, 0.0]
    assert (
        rows.confidence(0)
        == warm.confidence(0)
        == pytest.approx(float(torch.tensor([1.0, 2.0, 0.0]).softmax(-1).max()))
    )
    assert rows.entropy(0) == warm.entropy(0) > 0


def test_bans_hold_for_both_distributions():
    rows = span_of(
        torch.tensor([[1.0, 2.0, 0.0]]), Sampling(temperature=1.0, banned_token_ids=frozenset({1}))
    )
    assert rows.top == [0]
    assert float(rows.probs(0)[1]) == float(rows.raw(0)[1]) == 0.0


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.floats(-8, 8, width=32), min_size=6, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 5), max_size=8),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(st.integers(0, 5), st.floats(-9, 9)),
)
def test_penalties_and_biases_equal_a_loop_over_the_tokens_before_each_row(
    logits, written, presence, frequency, bias
):
    sampling = Sampling(
        temperature=1.0, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
    )
    rows = span_of(torch.tensor(logits), sampling, written=written)
    for i, row in enumerate(logits):
        before = written[: max(0, len(written) - (len(logits) - 1 - i))]
        want = torch.tensor(
            [
                z + bias.get(t, 0.0) - frequency * before.count(t) - presence * (t in before)
                for t, z in enumerate(row)
            ]
        )
        assert torch.allclose(rows.probs(i), want.softmax(-1), atol=1e-6)
        assert torch.allclose(rows.raw(i), torch.tensor(row).softmax(-1)), (
            "C, H and thresholds see neither"
        )
        assert rows.raw_logit(i, 2) == row[2]


def test_penalties_move_the_greedy_choice_and_leave_the_models_logits_alone():
    logits = torch.tensor([[2.0, 1.5, 0.0], [2.0, 1.5, 0.0]])
    rows = span_of(logits, Sampling(frequency_penalty=1.0), written=[0])
    assert rows.top == [0, 1]
    assert [sampled(rows, i, RandomStream(0, 1)) for i in (0, 1)] == [0, 1]
    assert rows.probs(1).tolist() == [0.0, 1.0, 0.0]
    assert rows.confidence(1) == span_of(logits, Sampling()).confidence(1)
    assert logits[1, 0] == 2.0


def test_a_request_without_penalties_or_biases_copies_nothing():
    logits = torch.zeros(2, 5)
    assert adjusted(logits, Sampling(), [1, 2]) is logits


def test_many_biases_take_few_operations_and_change_no_bit():
    class Operations(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            Operations.count += 1
            return operation(*args, **kwargs or {})

    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)) * 10
    biases = {token: (token - 300) / 7 for token in range(0, 900, 3)}
    expected = logits.clone()
    for token, bias in biases.items():
        expected[:, token] += bias
    with Operations():
        found = adjusted(logits, Sampling(logit_bias=biases), [])
    assert torch.equal(found, expected)
    assert Operations.count < 20


def test_a_bias_is_kept_as_pairs_however_it_was_given():
    assert Sampling(logit_bias={3: 1.0, 1: -2.0}) == Sampling(logit_bias=((1, -2.0), (3, 1.0)))
    assert replace(Sampling(logit_bias={3: 1.0}), seed=1).biases == ((3, 1.0),)


def test_bias_does_not_bring_back_a_banned_token():
    rows = span_of(
        torch.zeros(1, 3),
        Sampling(temperature=1.0, banned_token_ids=frozenset({1}), logit_bias={1: 100.0}),
    )
    assert float(rows.probs(0)[1]) == 0.0


def test_entropy_of_a_reduced_head_is_finite():
    rows = span_of(torch.tensor([[1.0, 1.0, -math.inf]]), Sampling())
    assert rows.entropy(0) == pytest.approx(math.log(2))


HEAD = torch.tensor([1, 4, 5, 8])
WARPERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 0.9, "top_p": 0.6},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "banned_token_ids": frozenset({4, 7})},
    {"presence_penalty": 1.5, "logit_bias": {5: 2.0, 2: 9.0}},
]


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@settings(max_examples=25)
@given(
    st.lists(
        st.lists(st.sampled_from([-9.0, -1.0, 0.0, 0.5, 2.0, 2.5]), min_size=4, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_rows_of_a_reduced_head_equal_rows_over_the_whole_vocabulary(warpers, logits):
    """Ties among the largest logits too: the first token wins in both."""
    sampling, written = Sampling(**warpers), [5, 1]
    output = all_rows(torch.tensor(logits), torch.zeros(len(logits), 3), HEAD, 10)
    whole = torch.full((len(logits), 10), -math.inf)
    whole[:, HEAD] = torch.tensor(logits)
    compact = output.under(sampling, Penalties(sampling).follow(written))
    full = span_of(whole, sampling, written=written)
    assert torch.equal(output.logits, whole)
    assert compact.top == full.top
    for row in range(len(logits)):
        assert compact.confidence(row) == pytest.approx(full.confidence(row), abs=1e-6)
        assert compact.entropy(row) == pytest.approx(full.entropy(row), abs=1e-6)
        assert torch.allclose(compact.probs(row), full.probs(row), atol=1e-6)
        assert torch.allclose(compact.raw(row), full.raw(row), atol=1e-6)
        assert [compact.raw_logit(row, token) for token in range(10)] == [
            full.raw_logit(row, token) for token in range(10)
        ]
        assert [compact.raw_prob(row, token) for token in range(10)] == pytest.approx(
            [float(q) for q in full.raw(row)], abs=1e-6
        )
        assert [sampled(compact, row, RandomStream(i, 1)) for i in range(9)] == [
            sampled(full, row, RandomStream(i, 1)) for i in range(9)
        ]


def test_a_reduced_head_is_never_spread_out_for_a_draft_step():
    """Confidence, entropy, the token and its probability come from the head's own columns; the
    vocabulary is not there to be read."""
    output = all_rows(torch.tensor([[0.5, 2.0, 0.0, 0.0]]), None, HEAD, vocab_size=-1)
    for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.9)):
        rows = output.under(sampling)
        token = sampled(rows, 0, RandomStream(0, 1))
        assert token in HEAD.tolist()
        assert 0 < rows.raw_prob(0, token) <= rows.confidence(0) < 1 < math.exp(rows.entropy(0))
    with pytest.raises(RuntimeError):
        output.under(Sampling()).raw(0)


LOOKS = {
    "top": lambda r: r.top,
    "probs": lambda r: r.probs(0),
    "raw": lambda r: r.raw(0),
    "raw_logit": lambda r: r.raw_logit(0, 0),
    "confidence": lambda r: r.confidence(0),
    "entropy": lambda r: r.entropy(0),
    "hidden": lambda r: r.hidden(0),
    "sample": lambda r: sampled(r, 0, RandomStream(0, 1)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("support", [None, torch.tensor([0, 3])], ids=["whole", "reduced"])
def test_nan_and_infinite_logits_of_any_row_are_named_at_the_first_look(
    look, bad, temperature, support
):
    logits = torch.tensor([[1.0, 2.0], [1.0, bad], [1.0, 2.0]])
    with raises_code("not_finite", "logits", error=NotFinite) as caught:
        look(
            all_rows(logits, torch.zeros(3, 4), support, 5).under(Sampling(temperature=temperature))
        )
    assert "\n" not in str(caught.value)


def test_a_row_without_any_finite_logit_is_named():
    with pytest.raises(NotFinite):
        span_of(torch.full((1, 3), -math.inf), Sampling(temperature=1.0)).probs(0)


def test_residual_without_mass_falls_back_to_the_target():
    p = torch.tensor([0.5, 0.5])
    assert torch.equal(residual(p, p), p)
    assert torch.allclose(
        residual(torch.tensor([0.7, 0.3]), torch.tensor([0.2, 0.8])), torch.tensor([1.0, 0.0])
    )


def test_extreme_temperatures_do_not_overflow():
    rows = span_of(torch.tensor([[10.0, 30.0, -math.inf]]), Sampling(temperature=1e-40))
    assert rows.probs(0).tolist() == [0.0, 1.0, 0.0]
    assert sampled(rows, 0, RandomStream(0, 1)) == 1


def test_a_draw_never_lands_on_a_token_without_mass():
    stream = RandomStream(0, 1)
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    drawn = [stream.draw(probs) for _ in range(2000)]
    assert set(drawn) == {1, 3}
    assert abs(drawn.count(3) / 2000 - 0.7) < 0.05


def test_zero_target_probability_always_rejects():
    stream = RandomStream(0, 2)
    assert not any(stream.accepts(0.0, q) for q in (0.0, 1e-30, 0.5, 1.0) for _ in range(50))
    assert all(stream.accepts(0.5, 0.5) for _ in range(50))


def test_streams_are_independent_of_each_other_and_of_order():
    a, b = Streams(7), Streams(7)
    probs = torch.full((50,), 0.02)
    first = [a.draft.draw(probs) for _ in range(5)]
    _ = [b.test.accepts(0.5, 1.0) for _ in range(9)]
    assert [b.draft.draw(probs) for _ in range(5)] == first
    assert [Streams(8).draft.draw(probs) for _ in range(5)] != first
    c = Streams(7)
    assert [c.sample.draw(probs) for _ in range(5)] != first


WRONG = [
    {"max_tokens": 0},
    {"temperature": -1},
    {"temperature": math.inf},
    {"temperature": math.nan},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": -1},
    {"presence_penalty": math.nan},
    {"frequency_penalty": math.inf},
    {"logit_bias": {1: math.inf}},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_sampling_is_refused(wrong):
    with raises_code("invalid_request", next(iter(wrong)), error=InvalidRequest):
        Sampling(**wrong)


def test_no_temperature_is_too_small_for_a_distribution():
    """The least positive float is 0 in float32, where 0/0 would leave NaN, and a draw from it a
    token beyond the vocabulary."""
    logits = torch.tensor([1.0, 3.0, 2.0, -5.0])
    for temperature in (5e-324, 1e-320, 1e-45, 1e-38, 1e-20):
        assert warp(logits, Sampling(temperature=temperature)).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_a_row_is_searched_once_for_its_confidence(monkeypatch):
    """A stop rule and a drafter both ask for each drafted token."""
    rows = span_of(torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]), Sampling())
    found = [rows.confidence(0), rows.confidence(1)]
    assert found == [float(rows.raw(row).max()) for row in range(2)]
    monkeypatch.setattr(torch.Tensor, "max", None)
    assert [rows.confidence(0), rows.confidence(1)] == found


def test_what_is_drawn_does_not_depend_on_the_number_of_threads() -> None:
    """PyTorch sums one long row in as many pieces as there are threads. The mass of the first 50
    tokens is a bound of top-p: with another last bit one more or one less is kept."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(60, 49152, generator=generator)[30:40]
    rows = span_of(logits, Sampling(temperature=1.0))
    bounds: list[float] = []

    def figures() -> list[object]:
        found: list[object] = []
        rows = span_of(logits, Sampling(temperature=1.0))
        for row in range(len(rows)):
            target, draft = rows.raw(row), rows.raw(row - 1)
            found += [rows.entropy(row), rows.token_figures(row, 5)]
            found += [divergence(name, target, draft, 5) for name in get_args(DivergenceName)]
            found.append(residual(target, draft).max().item())
            found.append(int(nucleus(logits[row], bounds[row]).isfinite().sum()))
        return found

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in range(len(rows)):
            bounds.append(float(logits[row].softmax(-1).topk(50).values.cumsum(-1)[-1]))
        alone = figures()
        torch.set_num_threads(2)
        assert figures() == alone
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("columns", [1, 5, 256, 257, 4099])
def test_a_column_is_found_where_the_cumulative_mass_exceeds_a_uniform(columns: int) -> None:
    """Against one running sum, at both ends, beside tokens without mass, and for masses that are
    not normalised."""
    generator = torch.Generator().manual_seed(columns)
    laws = (4 * torch.randn(7, columns, generator=generator)).softmax(-1)
    laws[:, ::3] = 0.0
    laws[:, -1] = laws[:, 0] = 0.25
    laws[2:4] *= 0.37
    laws[5, 1:] = 0.0
    for uniform in (0.0, 1e-9, 0.3, 0.77, 1 - 2**-53):
        found = inverted(laws, torch.full((7,), uniform, dtype=torch.float64))
        for law, column in zip(laws, found.tolist(), strict=True):
            cumulative = law.double().cumsum(0) / float(law.double().sum())
            assert law[column] > 0
            assert cumulative[column] >= uniform - 1e-12
            assert column == 0 or cumulative[column - 1] <= uniform + 1e-12
