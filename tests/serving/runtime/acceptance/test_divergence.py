"""Divergences against a slow reference, their bounds, and what exact zeros do to each."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from draftwell.serving.runtime.acceptance.divergence import (
    INFINITE_AT_ZEROS,
    check_support,
    divergence,
)
from tests.support.errors import raises_code

NAMES = ("tv", "kl", "js", "logit_gap", "fsd_js")


def slow_kl(p: list[float], q: list[float]) -> float:
    if any(a > 0 and b == 0 for a, b in zip(p, q, strict=True)):
        return math.inf
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def slow(name: str, p: list[float], q: list[float], token: int) -> float:
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    if name == "tv":
        return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    if name == "kl":
        return slow_kl(p, q)
    if name == "js":
        return (slow_kl(p, m) + slow_kl(q, m)) / 2
    if name == "fsd_js":
        return (slow_kl(m, p) + slow_kl(m, q)) / 2
    if p[token] == q[token]:
        return 0.0
    return abs(math.log(p[token] / q[token])) if min(p[token], q[token]) > 0 else math.inf


weights = st.lists(
    st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.5, 40.0]), min_size=4, max_size=4
).filter(any)


@given(weights, weights, st.integers(0, 3), st.permutations(range(4)))
def test_divergences_equal_their_definitions(
    a: list[float], b: list[float], token: int, order: list[int]
) -> None:
    p, q = (torch.tensor(w) / sum(w) for w in (a, b))
    for name in NAMES:
        value = divergence(name, p, q, token)
        assert value == pytest.approx(
            slow(name, p.double().tolist(), q.double().tolist(), token), abs=2e-6
        )
        assert value >= 0
        assert divergence(name, p, p, token) == pytest.approx(0, abs=1e-7)
        assert divergence(name, p[order], q[order], order.index(token)) == pytest.approx(
            value, abs=1e-6
        ), "labels do not matter"
        if name != "kl":
            assert divergence(name, q, p, token) == pytest.approx(value, abs=1e-6), "symmetric"
    assert divergence("tv", p, q, token) <= 1 + 1e-6
    assert divergence("js", p, q, token) <= math.log(2)
    assert divergence("fsd_js", p, q, token) >= divergence("js", p, q, token) - 1e-6


def test_a_draft_that_covers_a_part_of_the_vocabulary_has_infinite_divergences() -> None:
    p = torch.randn(1000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    logits = p.log()
    logits[500:] = -math.inf
    q = logits.softmax(-1)
    values = {name: divergence(name, p, q, 3) for name in NAMES}
    assert {name for name, value in values.items() if math.isinf(value)} == INFINITE_AT_ZEROS
    assert not any(math.isnan(value) for value in values.values())
    part, whole = SimpleNamespace(head_tokens=torch.arange(500)), SimpleNamespace(head_tokens=None)
    for name in NAMES:
        check_support(name, whole)
        if name in INFINITE_AT_ZEROS:
            with raises_code("infinite_divergence", name, "tv", "js"):
                check_support(name, part)
        else:
            check_support(name, part)


def test_peaked_distributions_whose_tail_underflows_are_safe() -> None:
    p, q = (
        torch.tensor([0.0, 300.0, -300.0]).softmax(-1),
        torch.tensor([300.0, 0.0, -300.0]).softmax(-1),
    )
    assert divergence("js", p, q, 0) == pytest.approx(math.log(2), abs=1e-6)
    assert divergence("tv", p, q, 0) == pytest.approx(1.0)
    assert divergence("kl", p, q, 0) == math.inf
