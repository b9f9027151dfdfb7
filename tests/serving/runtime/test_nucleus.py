"""Top-p over the first tokens of the order equals top-p over all of them, and all are put in order
only where it takes that."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import NUCLEUS, nucleus, warp

ROWS = st.lists(
    st.lists(
        st.one_of(st.floats(-9, 9, width=32), st.sampled_from([-math.inf, 0.0, 1.0, 2.0])),
        min_size=9,
        max_size=9,
    ).filter(lambda row: max(row) > -math.inf),
    min_size=1,
    max_size=3,
).map(torch.tensor)


def by_sorting(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """A row after another, a token after another, all of them in order: of equal ones the first
    comes first."""
    found = torch.full_like(logits, -math.inf)
    for row, values in enumerate(logits):
        order = values.sort(descending=True, stable=True).indices.tolist()
        mass = values.softmax(-1)[order].cumsum(-1).tolist()
        for place, token in enumerate(order):
            if place == 0 or mass[place - 1] < torch.tensor(top_p).item():
                found[row, token] = values[token]
    return found


@settings(max_examples=100)
@given(ROWS, st.floats(0.01, 0.999), st.integers(1, 12))
def test_it_equals_a_sort_of_everything_ties_included(logits, top_p, first):
    """However many are put in order at first: fewer than hold the mass, as many, or all."""
    top_p = torch.tensor(top_p).item()  # as float32 compares it
    assert torch.equal(nucleus(logits, top_p, [first, 2 * first]), by_sorting(logits, top_p))
    assert torch.equal(
        nucleus(logits[0], top_p, [first, 2 * first]), by_sorting(logits, top_p)[0]
    ), "a row alone too"


@pytest.mark.parametrize(("spread", "sorts"), [(3.0, 0), (0.01, 1)], ids=["peaked", "flat"])
def test_only_a_flat_distribution_is_sorted_whole(
    monkeypatch: pytest.MonkeyPatch, spread: float, sorts: int
) -> None:
    logits = torch.randn(2, 20 * NUCLEUS[-1], generator=torch.Generator().manual_seed(0)) * spread
    want = by_sorting(logits, 0.9)
    calls: list[Any] = []
    sort = torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda *a, **k: (calls.append(a), sort(*a, **k))[1])
    assert torch.equal(nucleus(logits, 0.9), want)
    assert len(calls) == sorts


def test_the_token_that_reaches_the_mass_is_kept_and_the_next_is_not():
    """A cut before it would leave less than top_p; with an off-by-one in the shortened order the
    last of them would go."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for first in (1, 2, 3, 4):
        assert (nucleus(logits, 0.65, [first]) > -math.inf).tolist() == [True, True, False, False]
        assert (nucleus(logits, 0.95, [first]) > -math.inf).tolist() == [True] * 4


def test_min_p_keeps_what_is_near_the_likeliest_after_top_p():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]).log()
    probs = warp(logits, Sampling(temperature=1.0, top_p=0.95, min_p=0.45))
    torch.testing.assert_close(
        probs, torch.tensor([[4 / 9, 3 / 9, 2 / 9, 0.0], [0.0, 2 / 9, 3 / 9, 4 / 9]])
    )
    assert warp(logits[0], Sampling(temperature=1.0, min_p=1.0)).tolist() == [1.0, 0.0, 0.0, 0.0]
    torch.testing.assert_close(
        warp(logits, Sampling(temperature=0.5, min_p=0.2)),
        warp(logits, Sampling(temperature=0.5, top_k=3)),
    )


def test_warping_still_renormalises_what_is_left():
    probs = warp(torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), Sampling(temperature=1.0, top_p=0.65))
    torch.testing.assert_close(probs, torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]))
