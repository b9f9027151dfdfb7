"""PyramidSD: the lengths of its rounds, the laws of both variants, caches of three models, and how
the stages are counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.acceptance.divergence import divergence
from draftwell.serving.runtime.acceptance.relaxed import RatioOrOwn, SampleAndMatch
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.types import Draft
from tests.support.errors import raises_code
from tests.support.models.counters import counters
from tests.support.models.enumeration import Oracle, joint_law, law_of, true_law
from tests.support.models.joint_distributions import Context, furthest
from tests.support.models.resources import decode, table_pair
from tests.support.models.spans import decided, span_of
from tests.support.models.table_model import TableModel

BOTH = ("pyramid_assisted", "pyramid_fuzzy")


def counting_models(vocab: int = 64) -> dict:
    """Three models that count 0, 1, 2 …, so that everything is kept."""
    table = torch.full((vocab, vocab), -20.0)
    for i in range(vocab):
        table[i, (i + 1) % vocab] = 20.0
    return {role: TableModel(table.clone()) for role in ("target", "draft", "qualifier")}


def run(name: str, models: dict, parameters: dict, **sampling):
    return decode(models, [1, 2], name, parameters, **sampling)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("l_d", "l_q", "drafted"),
    [(2, 5, [2, 1]), (5, 10, [5, 3]), (3, 4, [3]), (4, 4, [3]), (1, 5, [1, 1, 0]), (7, 1, [0])],
)
def test_inner_rounds_draft_no_more_than_the_target_is_given(monkeypatch, name, l_d, l_q, drafted):
    """The last inner round drafts min(l_D, l_Q - ready - 1), because the qualifier's own token
    counts."""
    rounds: list[int] = []
    real = Stats.count_inner
    monkeypatch.setattr(
        Stats,
        "count_inner",
        lambda self, draft, verdict: rounds.append(len(draft)) or real(self, draft, verdict),
    )
    budget = 1 + 3 * (l_q + 1)
    job = run(
        name,
        counting_models(),
        {"num_draft_tokens": l_d, "num_speculative_tokens": l_q},
        max_tokens=budget,
    )
    stats = job.session.stats
    assert job.output == list(range(3, 3 + budget))
    assert rounds == drafted * 3
    assert (stats.target_calls, stats.accepted, stats.sampled) == (3, 3 * l_q, 4)
    assert stats.drafted == stats.judged == 3 * l_q
    assert stats.qualifier_calls == stats.inner_rounds == 3 * len(drafted)
    assert stats.inner_drafted == stats.inner_accepted == stats.draft_calls == 3 * sum(drafted)
    assert stats.inner_sampled == stats.inner_rounds


def slow_reference(
    name: str,
    models: dict,
    prompt: list[int],
    budget: int,
    stop: int,
    l_d: int,
    l_q: int,
    tau_q: float,
    tau_t: float,
) -> list[int]:
    """Greedy PyramidSD straight from the tables, with no caches, lanes or rollbacks."""

    def best(role, ids):
        return int(models[role].next_logits(ids).argmax())

    def agree(judge, proposer, ids, token, tau):
        return (
            divergence(
                "js", *(models[r].next_logits(ids).softmax(-1) for r in (judge, proposer)), token
            )
            <= tau
        )

    text, output = list(prompt), []

    def emit(tokens):
        for token in tokens:
            if len(output) < budget and stop not in output:
                text.append(token)
                output.append(token)

    emit([best("target", text)])
    while len(output) < budget and stop not in output:
        ready: list[int] = []
        goal = min(l_q, budget - len(output) - 1)
        while len(ready) < goal and stop not in ready:
            draft: list[int] = []
            while len(draft) < min(l_d, goal - len(ready) - 1) and stop not in draft:
                draft.append(best("draft", text + ready + draft))
            for x in draft:
                t = best("qualifier", text + ready)
                if not (
                    x == t
                    if name == "pyramid_assisted"
                    else agree("qualifier", "draft", text + ready, x, tau_q)
                ):
                    ready.append(t)
                    break
                ready.append(x)
            else:
                if stop not in ready:
                    ready.append(best("qualifier", text + ready))
        kept: list[int] = []
        for x in ready:
            if not agree("target", "qualifier", text + kept, x, tau_t):
                kept.append(best("target", text + kept))
                break
            kept.append(x)
        else:
            if stop not in kept:
                kept.append(best("target", text + kept))
        emit(kept)
    return output


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("l_d", "l_q"), [(1, 1), (1, 2), (2, 5), (3, 4), (4, 9)])
def test_greedy_text_equals_a_reference_without_caches(name, l_d, l_q):
    for seed in range(12):
        models = table_pair(vocab=8, seed=seed, noise=1.2)
        parameters = {"num_draft_tokens": l_d, "num_speculative_tokens": l_q, "tau_target": 0.05}
        parameters |= {"tau_qualifier": 0.03} if name == "pyramid_fuzzy" else {}
        job = run(name, models, parameters, max_tokens=40, stop_token_ids=frozenset({5}))
        assert job.output == slow_reference(name, models, [1, 2], 40, 5, l_d, l_q, 0.03, 0.05)
        stats = job.session.stats
        assert stats.accepted + stats.sampled == stats.emitted == len(job.output)
        assert stats.accepted <= stats.judged <= stats.drafted
        assert (
            stats.inner_accepted <= stats.inner_judged <= stats.inner_drafted == stats.draft_calls
        )


@pytest.mark.parametrize(
    "warpers",
    [
        {"temperature": 0.0, "max_tokens": 4},
        {"temperature": 0.7, "max_tokens": 3},
        {"temperature": 1.0, "top_k": 2, "max_tokens": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("tau", [0.0, 0.05])
def test_assisted_follows_fuzzy_sd_with_the_qualifier_as_draft(tau, warpers):
    """Every ready token of PSD_A is the qualifier's own draw, whatever the draft proposed: x stays
    only where it is that draw.

    So the target judges text sampled from the qualifier, as fuzzy_sd does with the qualifier for
    its draft and gamma = l_Q. The draft changes how fast the text comes, never its law; an
    identical draft and qualifier is the special case.
    """
    models = table_pair(3, noise=0.8)
    sampling = Sampling(stop_token_ids=frozenset({2}), **warpers)
    pyramid = {"num_draft_tokens": 2, "num_speculative_tokens": 3, "tau_target": tau}
    fuzzy = {"num_speculative_tokens": 3, "tau": tau}
    two = {"target": models["target"], "draft": models["qualifier"]}
    expected = joint_law(lambda: build_strategy("fuzzy_sd", fuzzy), two, [0, 1], sampling)
    for draft in (models["draft"], models["qualifier"]):
        law = joint_law(
            lambda: build_strategy("pyramid_assisted", pyramid),
            models | {"draft": draft},
            [0, 1],
            sampling,
        )
        assert furthest(law, expected) < 1e-6


RATIO = {"qualifier_rule": "ratio"}


def own_with_ratio(qualifier: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """How a token falls that is kept with min(1, p/q) and else drawn from p."""
    both = torch.minimum(qualifier, draft)
    return both + (1 - both.sum()) * qualifier


@pytest.mark.parametrize(("tau", "temperature"), [(0.0, 1.0), (0.1, 0.7)])
def test_assisted_by_ratio_follows_its_rule_where_the_draft_proposed(tau, temperature):
    """Of two ready tokens the draft proposes the first, and the second is the qualifier's own
    draw, whether it is a bonus or stands behind a rejection."""
    models, sampling = table_pair(2, noise=1.5), Sampling(max_tokens=4, temperature=temperature)
    parameters = {"num_draft_tokens": 1, "num_speculative_tokens": 2, "tau_target": tau, **RATIO}
    law = joint_law(lambda: build_strategy("pyramid_assisted", parameters), models, [0], sampling)
    two = {"target": models["target"], "draft": models["qualifier"]}

    def expected(proposed: bool, at: Context, ids: list[int]) -> torch.Tensor:
        if divergence("js", at.P, at.Q, 0) > tau:
            return at.p
        if not proposed:
            return at.q
        third = Context({**two, "draft": models["draft"]}, ids, sampling)
        return own_with_ratio(at.q, third.q)

    wanted: dict[tuple[int, ...], float] = {(): 1.0}
    for place in range(4):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in wanted.items():
            at = Context(two, ids := [0, *text], sampling)
            shares = expected(place == 1, at, ids) if place in (1, 2) else at.p
            for token, share in enumerate(shares.tolist()):
                if share > 0:
                    longer[(*text, token)] = mass * share
        wanted = longer
    assert furthest(law, wanted) < 1e-6
    match = joint_law(
        lambda: build_strategy("pyramid_assisted", parameters | {"qualifier_rule": "match"}),
        models,
        [0],
        sampling,
    )
    assert (furthest(match, wanted) > 1e-3) == (tau > 0)


@given(
    st.lists(st.floats(0.001, 1), min_size=2, max_size=6),
    st.randoms(use_true_random=False),
)
def test_what_each_reading_of_psd_a_guarantees(weights, random):
    """By match a token follows the qualifier's p, whatever the draft's q. By ratio it is within
    β(1 − β) ≤ 1/4 of it in total variation, and kept more often: β = Σ min(p, q) ≥ Σ p·q."""
    p = torch.tensor(weights, dtype=torch.float64)
    q = torch.tensor([random.random() ** 4 + 1e-3 for _ in weights], dtype=torch.float64)
    p, q = p / p.sum(), q / q.sum()

    def law_and_kept(rule: Any) -> tuple[torch.Tensor, float]:
        def one(oracle: Oracle) -> tuple[int, bool]:
            sampling = Sampling(temperature=1.0)
            token = oracle.draw(q)
            draft = Draft([token], [span_of(q.log().float()[None], sampling)])
            rows = span_of(p.log().float().repeat(2, 1), sampling)
            found = decided(rule.judge(draft, rows, oracle, bonus=False))
            return (token, True) if found.accepted else (found.token, False)

        law = law_of(one)
        shares = [sum(m for (x, _), m in law.items() if x == token) for token in range(len(p))]
        return torch.tensor(shares, dtype=torch.float64), sum(
            m for (_, kept), m in law.items() if kept
        )

    own, matched = law_and_kept(SampleAndMatch())
    assert torch.allclose(own, p, atol=1e-6)
    assert matched == pytest.approx(float((p * q).sum()), abs=1e-6)
    other, kept = law_and_kept(RatioOrOwn())
    beta = float(torch.minimum(p, q).sum())
    assert torch.allclose(other, own_with_ratio(p, q), atol=1e-6)
    assert kept == pytest.approx(beta, abs=1e-6)
    assert kept >= matched - 1e-6
    assert float((other - p).abs().sum()) / 2 <= beta * (1 - beta) + 1e-6 <= 0.25 + 2e-6


def test_greedy_both_readings_of_psd_a_are_one():
    for seed in range(4):
        models = table_pair(8, seed=seed, noise=1.2)
        match, ratio = (
            run("pyramid_assisted", models, {"tau_target": 0.05, **one}, max_tokens=40)
            for one in ({}, RATIO)
        )
        assert match.output == ratio.output
        assert counters(match.session.stats) == counters(ratio.session.stats)


@pytest.mark.parametrize("name", BOTH)
def test_greedy_with_an_identical_draft_and_qualifier_the_inner_stage_keeps_everything(name):
    """Both variants: the same tokens as fuzzy_sd with the qualifier as draft, with as many target
    calls."""
    for seed in range(5):
        models = table_pair(8, seed=seed, noise=1.2)
        models["draft"] = models["qualifier"]
        zero = {"tau_qualifier": 0.0} if name == "pyramid_fuzzy" else {}
        job = run(
            name,
            models,
            {"num_draft_tokens": 3, "num_speculative_tokens": 6, "tau_target": 0.05, **zero},
            max_tokens=60,
        )
        two = {"target": models["target"], "draft": models["qualifier"]}
        fuzzy = run("fuzzy_sd", two, {"num_speculative_tokens": 6, "tau": 0.05}, max_tokens=60)
        stats, other = job.session.stats, fuzzy.session.stats
        assert stats.inner_accepted == stats.inner_judged
        assert job.output == fuzzy.output
        assert (
            stats.target_calls,
            stats.accepted,
            stats.judged,
            stats.drafted,
            stats.rescued,
            stats.accepted_at,
        ) == (
            other.target_calls,
            other.accepted,
            other.judged,
            other.drafted,
            other.rescued,
            other.accepted_at,
        )


def test_sampled_and_assisted_even_an_identical_draft_is_rejected():
    """The qualifier draws anew: it matches x with probability sum q(x)^2, not 1 (which is why PSD_A
    is slower than PSD_F)."""
    models = table_pair(8)
    models["draft"] = models["qualifier"]
    stats = run("pyramid_assisted", models, {}, max_tokens=100, temperature=1.0).session.stats
    assert stats.inner_accepted < stats.inner_judged
    stats = run(
        "pyramid_fuzzy", models, {"tau_qualifier": 0.0}, max_tokens=100, temperature=1.0
    ).session.stats
    assert stats.inner_accepted == stats.inner_judged > 0


@pytest.mark.parametrize("name", BOTH)
def test_thresholds_of_zero_leave_the_targets_own_law(name):
    """tau_T = 0 rejects wherever target and qualifier differ at all, and then samples p."""
    models, sampling = table_pair(2), Sampling(max_tokens=4, temperature=1.0)
    zero = {"tau_target": 0.0, "num_draft_tokens": 1, "num_speculative_tokens": 3}
    zero |= {"tau_qualifier": 0.0} if name == "pyramid_fuzzy" else {}
    law = joint_law(lambda: build_strategy(name, zero), models, [0], sampling)
    assert furthest(law, true_law(models["target"], [0], sampling)) < 1e-6


def test_wide_thresholds_let_everything_through():
    models = table_pair(8, noise=3.0)
    job = run("pyramid_fuzzy", models, {"tau_qualifier": 1.0, "tau_target": 1.0}, max_tokens=34)
    stats = job.session.stats
    assert stats.accepted == stats.judged == 30
    assert stats.inner_accepted == stats.inner_judged == stats.inner_drafted
    assert 0 < stats.rescued <= 30


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_budgets_and_stop_tokens(name, budget):
    for seed in range(10):
        job = run(
            name,
            table_pair(8, seed=seed),
            {},
            max_tokens=budget,
            temperature=1.0,
            seed=seed,
            stop_token_ids=frozenset({5}),
        )
        assert 5 not in job.output[:-1]
        assert len(job.output) == budget or job.output[-1] == 5
        assert job.session.stats.accepted + job.session.stats.sampled == len(job.output)


def test_a_qualifiers_calls_and_seconds_are_its_own():
    stats = run("pyramid_assisted", table_pair(8), {}, max_tokens=60).session.stats
    roles = [role for role, *_ in stats.timeline]
    assert (roles.count("qualifier"), roles.count("draft")) == (
        stats.qualifier_calls,
        stats.draft_calls,
    )
    assert roles.count("target") == stats.target_calls + stats.prefill_calls
    assert stats.qualifier_seconds > 0
    assert stats.inner_acceptance_rate == stats.inner_accepted / stats.inner_judged
    both = Stats.total([stats, stats])
    assert both.qualifier_calls == 2 * stats.qualifier_calls
    assert math.isclose(both.qualifier_seconds, 2 * stats.qualifier_seconds)
    assert Stats().inner_acceptance_rate is None


def test_what_cannot_work_is_one_line():
    with raises_code("bad_parameter", "tau_qualifier 0.5", "tau_target 0.3") as error:
        build_strategy("pyramid_fuzzy", {"tau_qualifier": 0.5, "tau_target": 0.3})
    assert "\n" not in str(error.value)
    with raises_code("bad_parameter", "divergence"):
        build_strategy("pyramid_assisted", {"divergence": "hellinger"})
    models = table_pair(8)
    del models["qualifier"]
    with raises_code("model_missing", "pyramid_fuzzy", "qualifier"):
        run("pyramid_fuzzy", models, {}, max_tokens=4)


@pytest.mark.parametrize("name", ["vanilla_sd", "fuzzy_sd"])
def test_baselines_draft_with_the_qualifier_where_they_are_told_to(name):
    """As PyramidSD's SD and fuzzy SD do: nothing is asked of the draft model."""
    for seed in range(3):
        models = table_pair(8, seed=seed, noise=1.2)
        sampling = Sampling(max_tokens=40)
        two = {"target": models["target"], "draft": models["qualifier"]}
        expected = Engine(two).generate(
            [0, 1], sampling, build_strategy(name, {"num_speculative_tokens": 3})
        )
        models["draft"] = None  # type: ignore[assignment]
        job = Engine(models).generate(
            [0, 1],
            sampling,
            build_strategy(name, {"num_speculative_tokens": 3, "drafter": "qualifier"}),
        )
        assert job.output == expected.output
        assert job.session.stats.accepted == expected.session.stats.accepted
        assert job.session.stats.accepted > 0


def test_a_pair_without_the_model_that_should_draft_is_one_clear_line():
    models = {role: model for role, model in table_pair(8).items() if role != "qualifier"}
    with pytest.raises(
        DraftwellError,
        match="drafter=qualifier needs a qualifier model, which this pair does not have",
    ):
        build_strategy("vanilla_sd", {"drafter": "qualifier"}).choose_models(models)
