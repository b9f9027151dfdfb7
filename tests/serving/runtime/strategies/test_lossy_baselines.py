"""Fuzzy, mentored and lossy speculative decoding: their laws by enumeration, their limits, and what
they reduce to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st

from draftwell.serving.runtime.acceptance.divergence import divergence
from draftwell.serving.runtime.acceptance.mentored import mentored
from draftwell.serving.runtime.acceptance.relaxed import Fuzzy
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import residual
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from draftwell.serving.runtime.types import Draft
from tests.support.errors import raises_code
from tests.support.models.counters import counters
from tests.support.models.enumeration import joint_law, true_law
from tests.support.models.joint_distributions import Context, furthest, law_of_four
from tests.support.models.resources import decode, table_pair, table_resources
from tests.support.models.spans import decided, span_of

LOSSY = [
    ("fuzzy_sd", {"tau": 0.0}),
    ("mentored", {}),
    ("lossy_sd", {"tau": 0.1}),
    ("fly", {"threshold": 0.0, "window": 0}),
    ("asd", {"gate": 9.0}),
    ("pyramid_assisted", {"tau_target": 0.0}),
    ("pyramid_fuzzy", {"tau_target": 0.0, "tau_qualifier": 0.0}),
]
WARPERS = [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 2}]


def run(
    name: str,
    parameters: dict,
    models: dict,
    *,
    tokens: int = 80,
    resources: StrategyResources | None = None,
    **sampling,
):
    job = decode(
        models,
        [1, 2],
        name,
        parameters,
        resources or table_resources(8),
        max_tokens=tokens,
        **sampling,
    )
    return job.output, job.session.stats


@pytest.mark.parametrize("warpers", [{"temperature": 0.0}, *WARPERS], ids=str)
@pytest.mark.parametrize(("name", "parameters"), LOSSY, ids=str)
def test_with_identical_models_every_lossy_rule_is_exact_and_keeps_everything(
    name, parameters, warpers
):
    target = table_pair(8)["target"]
    same = {"target": target, "draft": target, "qualifier": target}
    _, stats = run(name, parameters, same, **warpers)
    assert stats.accepted == stats.judged
    assert stats.rescued == 0
    target = table_pair(3)["target"]
    same = {"target": target, "draft": target, "qualifier": target}
    sampling = Sampling(max_tokens=3, stop_token_ids=frozenset({2}), **warpers)
    law = joint_law(
        lambda: build_strategy(name, parameters, table_resources()), same, [0, 1], sampling
    )
    assert furthest(law, true_law(target, [0, 1], sampling)) < 1e-6


# Fuzzy


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize("name", ["tv", "js", "kl", "fsd_js"])
def test_fuzzy_draws_from_the_draft_where_they_agree_and_from_the_target_elsewhere(name, warpers):
    models, sampling = table_pair(3, noise=0.8), Sampling(max_tokens=4, **warpers)
    seen = set()

    def judged(at: Context) -> torch.Tensor:
        seen.add(kept := divergence(name, at.P, at.Q, 0) <= 0.05)
        return at.q if kept else at.p

    parameters = {"divergence": name, "tau": 0.05, "num_speculative_tokens": 2}
    law = joint_law(lambda: build_strategy("fuzzy_sd", parameters), models, [0], sampling)
    assert furthest(law, law_of_four(models, [0], sampling, judged)) < 1e-6
    assert seen == {True, False}, "the threshold divides the contexts"


def test_fuzzy_logit_gap_keeps_by_the_token():
    models, sampling = table_pair(3), Sampling(max_tokens=4, temperature=1.0)

    def judged(at: Context) -> torch.Tensor:
        keeps = torch.tensor([divergence("logit_gap", at.P, at.Q, x) <= 0.5 for x in range(3)])
        return at.q * keeps + (at.q * ~keeps).sum() * at.p

    parameters = {"divergence": "logit_gap", "tau": 0.5, "num_speculative_tokens": 2}
    law = joint_law(lambda: build_strategy("fuzzy_sd", parameters), models, [0], sampling)
    assert furthest(law, law_of_four(models, [0], sampling, judged)) < 1e-6


def test_a_fuzzy_mutant_that_samples_the_residual_is_caught(monkeypatch):
    """The decision ignores x, so a residual would take q's mass away twice."""

    class Residual(Fuzzy):
        def judge(self, draft, target, rng, *, bonus=True):
            verdict = yield from super().judge(draft, target, rng, bonus=bonus)
            if verdict.rejected:
                i = verdict.accepted
                verdict.token = rng.sample.draw(residual(target.probs(i), draft.rows[i].probs(0)))
            return verdict

    monkeypatch.setattr("draftwell.serving.runtime.strategies.lossy.fuzzy_sd.Fuzzy", Residual)
    models, sampling = table_pair(3, noise=0.8), Sampling(max_tokens=3, temperature=1.0)
    law = joint_law(lambda: build_strategy("fuzzy_sd", {"tau": 0.0}), models, [0], sampling)
    assert furthest(law, true_law(models["target"], [0], sampling)) > 1e-3
    monkeypatch.undo()
    law = joint_law(lambda: build_strategy("fuzzy_sd", {"tau": 0.0}), models, [0], sampling)
    assert furthest(law, true_law(models["target"], [0], sampling)) < 1e-6, (
        "tau = 0 with different models samples p throughout"
    )


def test_fuzzy_decides_alike_at_every_temperature():
    """Div reads raw distributions: from one-hot ones it would be 0 or its maximum at temperature
    0."""
    logits = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))
    # ever less alike
    noise = (
        torch.arange(8)[:, None] / 4 * torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    )
    for name in ("tv", "kl", "js", "logit_gap", "fsd_js"):
        accepted = set()
        for temperature in (0.0, 0.3, 1.0):
            sampling = Sampling(temperature=temperature)
            draft = Draft(
                [5] * 8, [span_of((logits[i] + noise[i])[None], sampling) for i in range(8)]
            )
            limits = {"tv": 0.2, "kl": 0.15, "js": 0.04, "logit_gap": 0.6, "fsd_js": 0.04}
            rule = Fuzzy(name, limits[name])
            verdict = decided(rule.judge(draft, span_of(logits, sampling), Streams(0)))
            accepted.add(verdict.accepted)
        assert len(accepted) == 1
        assert 0 < accepted.pop() < 8


def test_fuzzy_kept_tokens_are_counted_apart():
    _, stats = run("fuzzy_sd", {"tau": 0.3}, table_pair(8, noise=2.0))
    assert 0 < stats.rescued < stats.accepted


@pytest.mark.parametrize(
    "altered",
    [{"logit_bias": {3: -20.0, 5: 2.0}}, {"presence_penalty": 3.0}, {"frequency_penalty": 1.5}],
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("csd", {"use_memory": False, "tau": 0.01}),
        ("lossy_sd", {"tau": 0.01}),
        ("fuzzy_sd", {"tau": 0.5}),
        ("fly", {"threshold": 0.0, "window": 0}),
        ("asd", {"budget": 99.0, "gate": 9.0}),
        ("pyramid_assisted", {"tau_target": 0.5}),
        ("pyramid_fuzzy", {"tau_target": 0.5, "tau_qualifier": 0.5}),
    ],
)
def test_penalties_and_biases_hold_inside_a_lossy_draft(name, parameters, altered):
    models = table_pair(8, noise=2.0)
    plain = run("autoregressive", {}, models, **altered)[0]
    output, stats = run(name, parameters, models, **altered)
    assert stats.rescued == 0
    assert output == plain
    assert run(name, parameters, models)[1].rescued > 0, "it rescues, or the test proves nothing"


# Mentored

distributions = st.lists(st.floats(0.001, 1), min_size=2, max_size=9)


def test_a_mentored_mixture_ends_where_float64_does():
    p, q = torch.tensor([1.0, 0.001], dtype=torch.float64) / 1.001, torch.tensor([1.0, 0.0])
    found = mentored(p, q.double(), 1.0)
    assert found.a < 1e-300
    assert float((p * (p / found.probs).log()).sum()) == pytest.approx(0.698, abs=1e-3)


@given(distributions, st.data(), st.floats(0.001, 1.5))
def test_mentored_mixture_is_a_distribution_at_the_divergence_asked_for(a, data, budget):
    b = data.draw(
        st.lists(st.just(0.0) | st.floats(1e-6, 1), min_size=len(a), max_size=len(a)).filter(
            lambda w: sum(w) > 0.01
        )
    )
    p, q = (torch.tensor(w, dtype=torch.float64) / sum(w) for w in (a, b))
    found = mentored(p, q, budget)
    away = (
        float(torch.nn.functional.kl_div(q.log(), p, reduction="sum"))
        if bool((q > 0).all())
        else math.inf
    )
    if away <= budget:
        assert torch.equal(found.probs, q)
        return
    assert float(found.probs.sum()) == pytest.approx(1, abs=1e-9)
    assert 0 <= found.a <= 1 <= found.b
    assert torch.allclose(
        found.probs, torch.maximum(found.a * p, torch.minimum(q, found.b * p)), atol=1e-9
    )
    divergence = float((p * (p / found.probs).log()).sum())
    if found.a < 1e-300:  # float64 holds no smaller a: p's rare token, which q never draws
        assert 0 <= divergence < budget
    else:
        assert divergence == pytest.approx(budget, abs=1e-6)
    assert bool((found.probs >= torch.minimum(p, q) - 1e-9).all()), (
        "whatever the exact test keeps stays"
    )


@given(distributions, st.data())
def test_no_mixture_at_the_same_divergence_is_kept_more_often(a, data):
    """pi is the best for acceptance: the linear mixture of p and q at the same KL is no better."""
    b = data.draw(st.lists(st.floats(0.001, 1), min_size=len(a), max_size=len(a)))
    p, q = (torch.tensor(w, dtype=torch.float64) / sum(w) for w in (a, b))
    share = data.draw(st.floats(0.05, 0.95))
    line = share * p + (1 - share) * q
    budget = float((p * (p / line).log()).sum())
    assume(1e-6 < budget < float((p * (p / q).log()).sum()) - 1e-6)
    best = mentored(p, q, budget).probs
    assert float(torch.minimum(best, q).sum()) >= float(torch.minimum(line, q).sum()) - 1e-7


def test_mentored_mixture_at_its_limits():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.0, 0.8])
    exact = mentored(p, q, 0.0)
    assert (exact.a, exact.b) == (pytest.approx(1), pytest.approx(1))
    assert torch.allclose(exact.probs, p, atol=1e-6)
    assert mentored(p, p, 0.0).probs.tolist() == p.tolist()
    wide = mentored(p, q, 5.0)
    assert float(wide.probs[1]) > 0, "what the draft rules out stays possible"
    cut = mentored(torch.tensor([0.9, 0.1, 0.0]), torch.tensor([0.1, 0.1, 0.8]), 1.0).probs
    assert float(cut[2]) == 0, "what the target rules out stays out"
    assert float(cut.sum()) == pytest.approx(1, abs=1e-6)
    apart = mentored(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), 0.2)
    assert (apart.probs.tolist(), apart.a, apart.b) == ([0, 1], 1, 1), (
        "nothing in common: the target alone"
    )
    generator = np.random.default_rng(0)
    p, q = (torch.from_numpy(generator.dirichlet(np.full(49152, 0.01))).float() for _ in range(2))
    q[8192:] = 0
    large = mentored(p, q / q.sum(), 0.2).probs.double()
    support = p > 0
    assert float(
        (p[support].double() * (p[support].double() / large[support]).log()).sum()
    ) == pytest.approx(0.2, abs=1e-3)


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize("budget", [0.02, 0.2])
def test_mentored_output_follows_the_mixture(budget, warpers):
    """Testing exactly first and keeping more at a rejection gives the same law as min(1, pi/q) with
    residual (pi - q)."""
    models, sampling = table_pair(3), Sampling(max_tokens=4, **warpers)
    law = joint_law(
        lambda: build_strategy("mentored", {"budget": budget, "num_speculative_tokens": 2}),
        models,
        [0],
        sampling,
    )
    expected = law_of_four(models, [0], sampling, lambda at: mentored(at.p, at.q, budget).probs)
    assert furthest(law, expected) < 1e-6
    assert furthest(law, true_law(models["target"], [0], sampling)) > 1e-3


@pytest.mark.parametrize(
    ("budget", "warpers"),
    [
        (0.0, {"temperature": 0.0}),
        (0.0, {"temperature": 1.0}),
        (0.5, {"temperature": 0.0}),
        (0.5, {"temperature": 1.0, "top_k": 1}),
    ],
    ids=str,
)
def test_mentored_without_budget_or_choice_is_vanilla(budget, warpers):
    mine = run("mentored", {"budget": budget}, table_pair(8, noise=1.5), seed=4, **warpers)
    vanilla = run("vanilla_sd", {}, table_pair(8, noise=1.5), seed=4, **warpers)
    assert mine[0] == vanilla[0]
    assert counters(mine[1]) == counters(vanilla[1])


def test_mentored_with_a_large_budget_keeps_everything():
    _, stats = run("mentored", {"budget": 50.0}, table_pair(8, noise=1.5), temperature=1.0)
    assert stats.accepted == stats.judged
    assert stats.rescued > 0


# Lossy SD


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("same", [{"min_count": 0}, {"use_memory": False}], ids=str)
def test_lossy_sd_is_csd_without_its_memory(same, temperature, seed):
    resources = StrategyResources(
        table_resources(8).artifacts, special_tokens=frozenset({3}), deterministic=True
    )
    settings = {"tau": 0.2, "num_speculative_tokens": 5}
    sampling = {"temperature": temperature, "seed": seed, "stop_token_ids": frozenset({6})}
    csd = run("csd", settings | same, table_pair(8, noise=2.0), resources=resources, **sampling)
    lossy = run("lossy_sd", settings, table_pair(8, noise=2.0), resources=resources, **sampling)
    assert csd[0] == lossy[0]
    assert counters(csd[1]) == counters(lossy[1])


@pytest.mark.parametrize("name", ["fuzzy_sd", "mentored", "lossy_sd", "fly", "asd"])
@pytest.mark.parametrize("budget", [1, 2, 5])
def test_stop_tokens_and_budgets_inside_a_kept_run(name, budget):
    parameters = {
        "fuzzy_sd": {"tau": 1.0},
        "mentored": {"budget": 9.0},
        "lossy_sd": {"tau": 0.001},
        "fly": {"threshold": 0.0, "window": 1},
        "asd": {"gate": 9.0},
    }[name]
    for seed in range(20):
        output, stats = run(
            name,
            parameters,
            table_pair(8),
            tokens=budget,
            temperature=1.0,
            seed=seed,
            stop_token_ids=frozenset({5}),
        )
        assert 5 not in output[:-1]
        assert len(output) == budget or output[-1] == 5
        assert stats.accepted + stats.sampled == stats.emitted == len(output)


def test_a_divergence_that_the_draft_cannot_have_is_refused():
    models = table_pair(8)
    models["draft"].head_tokens = torch.arange(4)
    with raises_code("infinite_divergence", "fsd_js", "tv", "js"):
        run("fuzzy_sd", {"divergence": "fsd_js"}, models)
    run("fuzzy_sd", {"divergence": "js"}, models)
    run("pyramid_assisted", {"divergence": "fsd_js"}, models)
    with raises_code("infinite_divergence", "kl", "tv", "js"):
        run("pyramid_fuzzy", {"divergence": "kl"}, models)
