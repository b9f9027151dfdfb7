"""What a forward pass says: float32 rows, and one search or computation for all requests that it
ran for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from draftwell.serving.errors import NotFinite
from draftwell.serving.runtime import logits as logits_module
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.logits import Logits, Span
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.random_streams import RandomStream
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import likeliest
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.spans import all_rows, sampled
from tests.support.models.tiny import llama_pair

KEEPS = [1, 3, 2]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each search for likeliest tokens."""
    found: list[int] = []
    monkeypatch.setattr(
        logits_module,
        "likeliest",
        lambda logits: (found.append(len(logits)), likeliest(logits))[1],
    )
    return found


def batch(
    columns: int = 7, support: torch.Tensor | None = None, cut: int | None = None
) -> tuple[torch.Tensor, list[Span]]:
    """The rows of a forward pass, and what each of three requests is given of them."""
    whole = torch.randn(sum(KEEPS), columns, generator=torch.Generator().manual_seed(1))[:, :cut]
    return whole, Logits(whole, whole, support, 20).split(KEEPS)


@pytest.mark.parametrize(
    "support", [None, torch.tensor([2, 3, 5, 7, 11, 13, 17])], ids=["whole", "reduced"]
)
@pytest.mark.parametrize("cut", [None, 5])
def test_requests_of_one_pass_share_a_search_and_get_their_own_rows(searches, support, cut):
    support = support if support is None else support[:cut]
    whole, spans = batch(support=support, cut=cut)
    rows = [span.under(Sampling(temperature=1.0)) for span in spans]
    tokens = whole.argmax(-1) if support is None else support[whole.argmax(-1)]
    assert [token for row in rows for token in row.top] == tokens.tolist()
    assert rows[1][1:3].top == tokens[2:4].tolist()
    assert rows[2][-1:].top == tokens[5:].tolist()
    assert rows[1][2].top == tokens[3:4].tolist()
    assert rows[1].at([2, 0]).top == tokens[[3, 1]].tolist()
    assert rows[1].at([2, 0])[1:].top == tokens[[1]].tolist()
    assert searches == [6]


def test_a_request_that_alters_its_logits_searches_its_own(searches):
    """The shared answer is the model's, not the one after a ban, a bias or a penalty."""
    whole, spans = batch()
    best = int(whole[1].argmax())
    others = whole[1].clone()
    others[best] = -math.inf
    for altered in ({"banned_token_ids": frozenset({best})}, {"logit_bias": {best: -99.0}}):
        assert spans[1].under(Sampling(**altered)).top[0] == int(others.argmax())
    penalised = Sampling(presence_penalty=99.0)
    changes = Penalties(penalised).follow([best, 6, 6])
    assert spans[1].under(penalised, changes).top[0] == int(others.argmax())
    assert spans[1].top == whole[1:4].argmax(-1).tolist()


def test_a_row_that_is_not_finite_is_the_fault_of_its_own_request(searches):
    _, spans = batch()
    spans[1].values[2, 3] = math.nan
    assert spans[0].under(Sampling()).top
    assert sampled(spans[2].under(Sampling(temperature=1.0)), 1, RandomStream(0, 1)) >= 0
    assert spans[2].confidence(0) < 1.0
    for look in (lambda: spans[1].top, lambda: spans[1].confidence(0), lambda: spans[1].raw(0)):
        with pytest.raises(NotFinite):
            look()
    assert searches == [6]


def test_rows_beside_others_have_the_bits_that_they_have_alone():
    """What is computed of a whole pass at once must not depend on who else is in it."""
    whole = 3 * torch.randn(9, 4099, generator=torch.Generator().manual_seed(4))
    whole[4, ::3] = -math.inf
    beside = Logits(whole)
    for place, row in enumerate(whole):
        alone = Logits(row[None].clone())
        assert torch.equal(beside.raw[place], alone.raw[0])
        assert torch.equal(beside.raw[place], row.softmax(-1))
        assert beside.confidence[place] == alone.confidence[0]
        assert beside.entropy[place] == alone.entropy[0]
        assert beside.ranked(5)[place] == alone.ranked(5)[0]


def test_a_copy_holds_nothing_of_the_pass_that_it_came_with():
    whole, spans = batch()
    copy = Span.joined([spans[1][2]])
    assert copy.values.tolist() == whole[3:4].tolist() == copy.states.tolist()
    assert copy.whole.values.untyped_storage().nbytes() == whole[0].numel() * 4
    assert Span.joined([spans[1][0]], hidden=False).states is None


def test_rows_of_several_passes_are_joined_in_order():
    whole, spans = batch(support=torch.arange(0, 14, 2))
    joined = Span.joined([spans[2], spans[0]])
    assert joined.values.tolist() == whole[[4, 5, 0]].tolist() == joined.states.tolist()
    assert joined.top == [2 * int(column) for column in whole[[4, 5, 0]].argmax(-1)]


def test_eight_requests_at_once_cost_one_search_a_forward_pass(searches):
    pair = llama_pair(slots=8)
    passes = []
    for model in pair.models.values():
        forward = model.forward
        model.forward = lambda rows, forward=forward: (
            passes.append(sum(row.keep for row in rows)),
            forward(rows),
        )[1]
    engine = Engine(pair.models)
    jobs: list[Any] = [
        engine.submit(
            [3 + i, 4],
            Sampling(max_tokens=12, temperature=i % 2, seed=i),
            build_strategy("vanilla_sd"),
        )
        for i in range(8)
    ]
    engine.run(jobs)
    assert searches == passes


@pytest.mark.parametrize("columns", [1, 5, 24, 67])
@settings(max_examples=60)
@given(data=st.data())
def test_the_likeliest_is_the_first_largest_where_it_is_finite(columns, data):
    """Ties, NaN, ±∞, rows of a wider tensor, and widths that vectors do not fill."""
    values = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0, 3.0, math.inf, math.nan])
    rows = data.draw(
        st.lists(
            st.lists(values, min_size=columns + 2, max_size=columns + 2), min_size=1, max_size=3
        )
    )
    logits = torch.tensor(rows)[:, :columns]
    want = logits.max(-1)
    assert torch.equal(
        likeliest(logits), torch.where(want.values.isfinite(), want.indices, torch.tensor(-1))
    )


def test_float32_tells_apart_what_bfloat16_would_not():
    """Two logits that round to one value in bfloat16: an argmax after rounding takes the first."""
    close = torch.tensor([[20.00, 20.01, 0.0]])
    assert close.bfloat16().argmax(-1).tolist() == [0]
    rows = all_rows(close).under(Sampling(temperature=1.0))
    assert rows.top == [1]
    assert rows.probs(0)[1] > rows.probs(0)[0]
    assert sampled(rows, 0, RandomStream(0, 1)) in (0, 1)
    assert all_rows(close).under(Sampling(logit_bias={2: 1.0})).top == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_models_rows_are_worked_on_in_float32(dtype):
    """In bfloat16 the probabilities of 2,000 tokens sum to anything but 1."""
    logits = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = all_rows(logits).under(Sampling(temperature=0.7, top_p=0.9))
    for probs in (rows.probs(0), rows.raw(1), all_rows(logits).logits):
        assert probs.dtype == torch.float32
    assert float(rows.probs(0).sum()) == pytest.approx(1.0, abs=1e-5)
    assert rows.top == logits.argmax(-1).tolist()
