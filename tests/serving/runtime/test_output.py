"""What a forward pass returns: float32 rows, and one search for the likeliest tokens of all
requests that it ran for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from draftwell.serving.errors import NotFinite
from draftwell.serving.runtime import sampling as sampling_module
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.output import Output, share_top
from draftwell.serving.runtime.random_streams import RandomStream
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import largest_with_place
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.tiny import llama_pair

KEEPS = [1, 3, 2]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each search for likeliest tokens."""
    found: list[int] = []
    search = sampling_module.likeliest
    monkeypatch.setattr(
        sampling_module,
        "likeliest",
        lambda logits, support=None: (found.append(len(logits)), search(logits, support))[1],
    )
    return found


def batch(
    columns: int = 7, support: torch.Tensor | None = None, cut: int | None = None
) -> tuple[torch.Tensor, list[Output]]:
    """Rows of three requests as one tensor, as a model's head gives them, and the outputs that are
    views of it."""
    whole = torch.randn(sum(KEEPS), columns, generator=torch.Generator().manual_seed(1))[:, :cut]
    return whole, [Output(part, part, support, 20) for part in whole.split(KEEPS)]


@pytest.mark.parametrize(
    "support", [None, torch.tensor([2, 3, 5, 7, 11, 13, 17])], ids=["whole", "reduced"]
)
@pytest.mark.parametrize("cut", [None, 5])
def test_requests_of_one_pass_share_a_search_and_get_their_own_rows(searches, support, cut):
    whole, outputs = batch(support=support, cut=cut)
    support = support if support is None else support[:cut]
    for output in outputs:
        output.support = support
    rows = [output.rows(Sampling(temperature=1.0)) for output in share_top(outputs)]
    tokens = whole.argmax(-1) if support is None else support[whole.argmax(-1)]
    assert [token for row in rows for token in row.top] == tokens.tolist()
    assert outputs[1].part(1, 3).rows(Sampling()).top == tokens[2:4].tolist()
    assert outputs[2].last(1).rows(Sampling()).top == tokens[5:].tolist()
    assert searches == [6]


def test_a_request_that_alters_its_logits_searches_its_own(searches):
    """The shared answer is the model's, not the one after a ban, a bias or a penalty."""
    whole, outputs = batch()
    share_top(outputs)
    best = int(whole[1].argmax())
    others = whole[1].clone()
    others[best] = -math.inf
    for altered in ({"banned_token_ids": frozenset({best})}, {"logit_bias": {best: -99.0}}):
        assert Output(outputs[1].compact, None).rows(Sampling(**altered)).top[0] == int(
            others.argmax()
        )
        assert outputs[1].rows(Sampling(**altered)).top[0] == int(others.argmax())
    assert outputs[1].rows(Sampling(presence_penalty=99.0), [best, 6, 6]).top[0] == int(
        others.argmax()
    )


def test_a_row_that_is_not_finite_is_the_fault_of_its_own_request(searches):
    _, outputs = batch()
    outputs[1].compact[2, 3] = math.nan
    share_top(outputs)
    assert outputs[0].rows(Sampling()).top
    assert outputs[2].rows(Sampling()).sample(1, RandomStream(0, 1)) >= 0
    with pytest.raises(NotFinite):
        _ = outputs[1].rows(Sampling()).top
    assert searches == [6]


@pytest.mark.parametrize(
    "outputs",
    [
        lambda: [Output(torch.eye(4)[i : i + 1]) for i in range(3)],  # tensors of their own
        # rows of one, in another order
        lambda: [Output(part) for part in reversed(torch.eye(4).split(1))],
        lambda: [Output(part) for part in torch.eye(4)[::2].split(1)],  # with rows between them
        lambda: [Output(part) for part in torch.eye(4).t().split(1)],
        lambda: [Output(torch.eye(4)[:1])],
    ],
    ids=["apart", "reversed", "gaps", "transposed", "one"],
)
def test_rows_that_are_not_consecutive_are_found_right(outputs):
    wanted = [output.compact.argmax(-1).tolist() for output in outputs()]
    assert [output.rows(Sampling()).top for output in share_top(outputs())] == wanted


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
def test_the_largest_with_its_place_is_the_first_largest(columns, data):
    """Ties, NaN, ±∞, rows of a wider tensor, and widths that vectors do not fill."""
    values = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0, 3.0, math.inf, math.nan])
    rows = data.draw(
        st.lists(
            st.lists(values, min_size=columns + 2, max_size=columns + 2), min_size=1, max_size=3
        )
    )
    logits = torch.tensor(rows)[:, :columns]
    (largest, place), want = largest_with_place(logits), logits.max(-1)
    assert torch.equal(place, want.indices)
    torch.testing.assert_close(largest, want.values, equal_nan=True, rtol=0, atol=0)


def test_float32_tells_apart_what_bfloat16_would_not():
    """Two logits that round to one value in bfloat16: an argmax after rounding takes the first."""
    close = torch.tensor([[20.00, 20.01, 0.0]])
    assert close.bfloat16().argmax(-1).tolist() == [0]
    rows = Output(close).rows(Sampling(temperature=1.0))
    assert rows.top == [1]
    assert rows.probs(0)[1] > rows.probs(0)[0]
    assert rows.sample(0, RandomStream(0, 1)) in (0, 1)
    assert Output(close).rows(Sampling(logit_bias={2: 1.0})).top == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_models_rows_are_worked_on_in_float32(dtype):
    """In bfloat16 the probabilities of 2,000 tokens sum to anything but 1."""
    logits = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = Output(logits).rows(Sampling(temperature=0.7, top_p=0.9))
    for probs in (rows.probs(0), rows.raw(1), Output(logits).logits):
        assert probs.dtype == torch.float32
    assert float(rows.probs(0).sum()) == pytest.approx(1.0, abs=1e-5)
    assert rows.top == logits.argmax(-1).tolist()
