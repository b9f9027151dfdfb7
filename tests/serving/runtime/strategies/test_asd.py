"""ASD: its authors' description over tables (Kissmetothemoon/ASD, "How ASD Works"), its budget
under any draft, and what it is without one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.strategies.lossy.asd import WithinBudget
from draftwell.serving.runtime.types import Draft
from tests.support.models.counters import counters
from tests.support.models.enumeration import law_of, run_once
from tests.support.models.resources import decode
from tests.support.models.spans import decided, span_of
from tests.support.published.decoding import Decoded, Reader, Round
from tests.support.published.pairs import PROMPT, Pair, Seen, pairs, rounds_seen, tables


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The rounds of our strategy, as long as somebody clears the list between requests."""
    return rounds_seen(monkeypatch)


def longest_prefix(
    regrets: list[float], spent: float, budget: float, g: float, m: int
) -> tuple[int, list[float]]:
    """Tokens of the block that are accepted, and the regrets of those that are no argmax.

    Args:
        regrets: r_i of each draft token; 0 for the target's argmax.
    """
    k = len(regrets)

    def feasible(length: int) -> bool:
        mismatches = [(i, r) for i, r in enumerate(regrets[:length]) if r > 0]
        return (
            spent + sum(r for _, r in mismatches) <= budget
            and all(r / (k - i) <= g for i, r in mismatches)
            and len(mismatches) <= m
        )

    accepted = max(length for length in range(k + 1) if feasible(length))
    return accepted, [r for r in regrets[:accepted] if r > 0]


def asd(
    target: Reader,
    drafter: Reader,
    prompt: list[int],
    max_tokens: int,
    gamma: int,
    budget: float,
    g: float,
    m: int,
) -> tuple[Decoded, int]:
    """Greedy rounds until all tokens are written, and how many were accepted against the target."""
    x, end, rounds, kept, spent = list(prompt), len(prompt) + max_tokens, list[Round](), 0, 0.0
    while len(x) < end:
        length = min(gamma, end - len(x) - 1)
        drafted: list[int] = []
        for _ in range(length):
            drafted.append(drafter.best(x + drafted))
        rows = [target.read(x + drafted[:i])[0] for i in range(length)]
        regrets = [
            float(row.max()) - float(row[token]) for row, token in zip(rows, drafted, strict=True)
        ]
        n, charged = longest_prefix(regrets, spent, budget, g, m)
        spent, kept = spent + sum(charged), kept + len(charged)
        x += [*drafted[:n], target.best(x + drafted[:n])]
        rounds.append(Round(length, min(n + 1, length), n))
    return Decoded(x[len(prompt) :], rounds), kept


def regret_of(pair: Pair, output: list[int]) -> float:
    """ln p̄ of the target's choices after an output's prefixes, less that of its tokens: by the
    table, not by what the rule added up."""
    total = 0.0
    for i, token in enumerate(output):
        logits = pair.target.read([*PROMPT, *output[:i]])[0].log_softmax(-1).double()
        total += float(logits.max() - logits[token])
    return total


@pytest.mark.parametrize(
    ("budget", "gate", "exceptions"), [(8.0, 0.25, 2), (2.0, 1.0, 1), (1e9, 1e9, 32), (0.7, 0.3, 6)]
)
def test_it_is_the_authors_description(rounds, budget, gate, exceptions):
    kept = rejected = 0
    for pair in pairs():
        rounds.clear()
        parameters = {
            "num_speculative_tokens": 6,
            "budget": budget,
            "gate": gate,
            "exceptions": exceptions,
        }
        job = decode(pair.models, PROMPT, "asd", parameters, max_tokens=60)
        first = pair.target.best(PROMPT)
        paper, stayed = asd(
            pair.target, pair.draft, [*PROMPT, first], 59, 6, budget, gate, exceptions
        )
        assert job.output == [first, *paper.text]
        assert rounds == paper.rounds
        assert job.session.stats.rescued == stayed
        kept += stayed
        rejected += sum(one.judged > one.accepted for one in rounds)
    assert kept > 0
    assert rejected > 0 or gate == 1e9


@pytest.mark.parametrize("budget", [0.5, 3.0, 8.0])
def test_a_text_costs_no_more_than_its_budget(budget):
    """Over all rounds of a request, whoever drafts: here a draft that is wrong almost always."""
    spent = []
    for pair in (*pairs(), *(tables(seed, noise=4.0) for seed in range(3))):
        parameters = {"budget": budget, "gate": 1e9, "exceptions": 32}
        job = decode(pair.models, PROMPT, "asd", parameters, max_tokens=80)
        spent.append(regret_of(pair, job.output))
    assert max(spent) <= budget + 1e-4, "float32 logits, added up once more in float64"
    assert max(spent) > 0.6 * budget, "the budget is what ends it, or the test proves nothing"


LOGITS = st.lists(
    st.lists(st.floats(-20, 20, width=32), min_size=4, max_size=4), min_size=2, max_size=7
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(LOGITS, min_size=1, max_size=5), st.data(), st.floats(0, 30), st.floats(0, 5),
    st.integers(0, 4),
)  # fmt: skip
def test_no_draft_spends_more(blocks, data, budget, gate, most):
    """Any drafts over any rows: the rule's own sum stays within, and is that of what stayed."""
    rule, total = WithinBudget(budget, gate, most), 0.0
    for rows in blocks:
        length = len(rows) - 1
        tokens = data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
        span = span_of(torch.tensor(rows), Sampling())
        verdict = decided(rule.judge(Draft(tokens), span, Streams(0)))
        assert len(verdict.rescued_at) <= most
        for i in verdict.rescued_at:
            regret = span.raw_logit(i, span.top[i]) - span.raw_logit(i, tokens[i])
            assert regret <= gate * (length - i)
            total += regret
        if verdict.accepted < length:
            assert verdict.token == span.top[verdict.accepted]
    assert rule.spent == total <= budget


def verdict_on(tokens: list[int], rule: WithinBudget, row: list[float] | None = None, **of: Any):
    rows = torch.tensor([row or [1.0, 0.9, 0.8]] * (len(tokens) + 1))
    return decided(rule.judge(Draft(tokens), span_of(rows, Sampling(**of)), Streams(0)))


@pytest.mark.parametrize(
    ("tokens", "budget", "gate", "most", "rescued_at"),
    [
        ([1, 0, 1, 0], 1.0, 0.1, 4, [0, 2]),
        ([1, 0, 1, 0], 1.0, 0.1, 1, [0]),  # m of a draft
        ([1, 0, 1, 0], 0.15, 0.1, 4, [0]),  # the second would pass the budget
        ([0, 0, 2, 0], 1.0, 0.11, 4, [2]),  # 0.2 of regret with two tokens from it on
        ([0, 0, 0, 2], 1.0, 0.11, 4, []),  # with one
        ([1, 0], 1.0, 0.1, 0, []),
        ([1, 0], 0.0, 0.1, 4, []),
        ([3, 0], 9.0, 9.0, 4, []),  # a special token
    ],
)
def test_the_three_limits(tokens, budget, gate, most, rescued_at):
    rule = WithinBudget(budget, gate, most, frozenset({3}))
    found = verdict_on(tokens, rule, [1.0, 0.9, 0.8, 0.9])
    assert list(found.rescued_at) == rescued_at
    assert found.token == 0


def test_the_budget_is_the_requests_and_the_exceptions_are_the_drafts():
    rule = WithinBudget(0.25, 1.0, 1)
    assert [list(verdict_on([1, 1], rule).rescued_at) for _ in range(3)] == [[0], [0], []]
    assert rule.spent == pytest.approx(0.2)
    assert list(verdict_on([1, 1], WithinBudget(0.25, 1.0, 1)).rescued_at) == [0], "another request"


@pytest.mark.parametrize(
    "altered",
    [
        {"logit_bias": {1: -0.05}},
        {"stop_token_ids": frozenset({1})},
        {"stop_token_ids": frozenset({0})},  # the target ends the text
        {"banned_token_ids": frozenset({1})},
        {"presence_penalty": 0.1},
    ],
    ids=str,
)
def test_what_a_request_rules_out_does_not_stay(altered):
    assert list(verdict_on([1, 0], WithinBudget(9.0, 9.0, 9)).rescued_at) == [0]
    assert verdict_on([1, 0], WithinBudget(9.0, 9.0, 9), **altered).accepted == 0


def test_nothing_stays_against_a_special_token():
    for special, accepted in ((0, 0), (2, 2)):
        rule = WithinBudget(9.0, 9.0, 9, frozenset({special}))
        assert verdict_on([1, 1], rule).accepted == accepted


def test_regret_is_against_what_would_have_been_chosen():
    """Behind a ban the second best is the choice, and costs nothing."""
    rule = WithinBudget(9.0, 9.0, 9)
    found = verdict_on([2], rule, banned_token_ids=frozenset({0}))
    assert (found.accepted, rule.spent) == (1, pytest.approx(0.1))


def test_without_a_budget_it_is_vanilla_speculative_decoding():
    """Ties included, whose regret is nothing: the text is plain decoding's."""
    tie = [1.0, 1.0, 0.5]
    for rule in (WithinBudget(0.0, 9.0, 9), WithinBudget(9.0, 9.0, 0)):
        assert verdict_on([1, 0], rule, tie).accepted == 0
    for parameters in ({"budget": 0.0}, {"exceptions": 0}):
        for pair in pairs():
            mine = decode(pair.models, PROMPT, "asd", parameters, max_tokens=60)
            vanilla = decode(pair.models, PROMPT, "vanilla_sd", max_tokens=60)
            assert mine.output == vanilla.output
            assert counters(mine.session.stats) == counters(vanilla.session.stats)


def test_a_sampled_request_has_the_targets_law():
    pair, sampling = tables(3, vocab=3, temperature=1.0), Sampling(max_tokens=3, temperature=1.0)
    loose = {"num_speculative_tokens": 2, "budget": 1e9, "gate": 1e9, "exceptions": 9}

    def ours(oracle: Any) -> Any:
        return tuple(
            run_once(build_strategy("asd", loose), pair.models, PROMPT, sampling, oracle).output
        )

    def plain(oracle: Any) -> Any:
        return tuple(
            run_once(build_strategy("autoregressive"), pair.models, PROMPT, sampling, oracle).output
        )

    mine, true = law_of(ours), law_of(plain)
    assert math.isclose(sum(mine.values()), 1.0, abs_tol=1e-6)
    assert max(abs(mine.get(text, 0.0) - true.get(text, 0.0)) for text in mine | true) < 1e-6
