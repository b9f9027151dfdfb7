"""SPRINTER's loop: who judges what, and how far the output may move from the target's
distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.sequential import sequential
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.strategies.compose import compose
from draftwell.serving.runtime.types import Draft
from tests.support.models.enumeration import joint_law, true_law
from tests.support.models.resources import ORIGIN, decode, table_pair, table_resources
from tests.support.models.spans import decided, span_of


def verifier(weight: list[float], bias: float = 0.0, features=("before",)) -> Verifier:
    return Verifier(torch.tensor(weight), bias, features, 0.5, 1.2, ORIGIN)


def test_a_verifier_that_flags_everything_is_lossless():
    models, sampling = table_pair(), Sampling(max_tokens=3, temperature=1.0)
    for features in (("before",), ("after",)):
        resources = table_resources(verifier=verifier([0.0] * 3, bias=-50.0, features=features))
        law = joint_law(
            lambda resources=resources: build_strategy("sprinter", {}, resources),
            models,
            [0],
            sampling,
        )
        truth = true_law(models["target"], [0], sampling)
        assert max(abs(law.get(k, 0) - truth.get(k, 0)) for k in truth) < 1e-6


@pytest.mark.parametrize("seed", [1, 2])
def test_total_variation_of_a_token_is_what_the_theorem_says(seed):
    """Per context TV(output, p) = sum_x a(x) max(0, q - p), a = 1 where the verifier accepts (exact
    form of Theorem 3.1).

    The second token of the text is the first drafted one; its verifier sees x through the `scalars`
    features, q(x) above .4.
    """
    models, sampling = (
        table_pair(vocab=4, seed=seed, sharpness=1.0),
        Sampling(max_tokens=2, temperature=1.0),
    )
    resources = table_resources(
        4, verifier=verifier([100.0, 0.0, 0.0, 0.0], bias=-30.0, features=("scalars",))
    )
    law = joint_law(lambda: build_strategy("sprinter", {}, resources), models, [0], sampling)
    for first in range(4):
        p = span_of(models["target"].next_logits([0, first])[None], sampling).probs(0).double()
        q = span_of(models["draft"].next_logits([0, first])[None], sampling).probs(0).double()
        mass = sum(m for k, m in law.items() if k[0] == first)
        out = torch.tensor([law.get((first, x), 0.0) / mass for x in range(4)], dtype=torch.double)
        accepted = (100.0 * q - 30.0 > 0).double()
        predicted = float((accepted * (q - p).clamp(min=0)).sum())
        assert float((out - p).abs().sum() / 2) == pytest.approx(predicted, abs=1e-6)


def expected_run(true_positive: float, false_positive: float, acceptable: int) -> float:
    """E[N] of Theorem 3.3, Eq. 3: tokens that the verifier keeps in a row where the first
    `acceptable` deserve it."""
    t, f, r = true_positive, false_positive, acceptable
    return (t - t**r) / (1 - t) + t**r / (1 - f)


@pytest.mark.parametrize(("t", "f", "r"), [(0.8, 0.3, 5), (0.95, 0.5, 3), (0.5, 0.0, 4)])
def test_run_lengths_follow_theorem_3_3(t, f, r):
    """A verifier that errs independently, on runs whose first r tokens are acceptable and whose
    others are not.

    Eq. 3 sums P(N >= i): t + ... + t^(r-1), then t^r·(1 + f + f² + ...), as the distribution in the
    theorem says.
    """
    chain = sum(
        i * (t**i * (1 - t) if i < r else t**r * f ** (i - r) * (1 - f)) for i in range(400)
    )
    assert expected_run(t, f, r) == pytest.approx(chain)
    coin = np.random.default_rng(0)
    lengths: list[int] = []
    place = 0

    def trusts(row, after, token) -> bool:
        nonlocal place
        keep = bool(coin.random() < (t if place < r else f))
        if not keep:
            lengths.append(place)
        place = place + 1 if keep else 0
        return keep

    models = table_pair(vocab=8)
    for model in models.values():
        model.max_context = model.slots.max_context = 40_000
    tokens = 6_000
    strategy = compose(lambda session: sequential(session, trusts, Exact(), 10_000, False))
    stats = (
        Engine(models)
        .generate([1], Sampling(max_tokens=tokens, temperature=1.0), strategy)
        .session.stats
    )
    assert stats.rescued == sum(lengths) + place, "what the verifier keeps is counted apart"
    assert stats.target_calls == len(lengths) > 800
    error = np.std(lengths) / math.sqrt(len(lengths))
    assert np.mean(lengths) == pytest.approx(expected_run(t, f, r), abs=4 * error)
    for i in range(r + 2):
        share, theory = (
            np.mean(np.array(lengths) == i),
            t**i * (1 - t) if i < r else t**r * f ** (i - r) * (1 - f),
        )
        assert share == pytest.approx(
            theory, abs=4 * math.sqrt(theory * (1 - theory) / len(lengths)) + 1e-9
        )


def test_a_zero_uniform_does_not_keep_a_token_that_the_target_rules_out():
    """r = 0 with p(x) = 0: rejecting at c > p/q only, as the paper's Algorithm 2 does, would keep
    x."""

    class Zero:
        def random(self) -> float:
            return 0.0

    rng = Streams(0)
    rng.test._generator = Zero()  # type: ignore[assignment]
    sampling = Sampling(temperature=1.0, top_k=1)
    rows = span_of(torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0]]), sampling)
    draft = Draft([1], [span_of(torch.tensor([[0.0, 5.0, 0.0]]), sampling)])
    verdict = decided(Exact().judge(draft, rows, rng))
    assert (verdict.accepted, verdict.token) == (0, 0)


def test_the_token_at_the_cap_is_judged():
    models = table_pair(vocab=8)
    resources = table_resources(8, verifier=verifier([0.0] * 8, bias=50.0))
    stats = decode(models, [1], "sprinter", {"max_run": 5}, resources, max_tokens=61).session.stats
    assert stats.rescued + stats.target_calls == stats.judged, (
        "four trusted tokens and one judged in every full run"
    )
    assert stats.target_calls >= 60 // 6
    assert stats.accepted + stats.sampled == stats.emitted == 61


def test_stop_tokens_go_to_the_target():
    """A draft that wants to stop early is not believed, however much the verifier trusts it."""
    models = table_pair(vocab=8, noise=3.0)
    models["draft"].table[..., 3] += 50.0
    resources = table_resources(8, verifier=verifier([0.0] * 8, bias=50.0))
    sampling = Sampling(max_tokens=20, stop_token_ids=frozenset({3}))
    job = Engine(models).generate([1], sampling, build_strategy("sprinter", {}, resources))
    reference = Engine(models).generate([1], sampling, build_strategy("autoregressive"))
    assert job.output == reference.output, (
        "every drafted token is a stop token, so the target decides each"
    )


@pytest.mark.parametrize("features", [("before",), ("after",), ("before", "after", "scalars")])
def test_caches_stay_right_with_every_feature(features):
    """A verifier that reads the state behind x must not leave x in the cache when x is rejected."""
    models = table_pair(vocab=8, noise=2.0)
    width = sum({"before": 8, "after": 8, "scalars": 4}[f] for f in features)
    resources = table_resources(8, verifier=verifier([0.3] * width, features=features))
    job = decode(models, [1], "sprinter", {}, resources, max_tokens=60)
    assert job.session.stats.emitted == 60
    ids = [1, *job.output]
    # every token is the draft's or the target's argmax on the true prefix
    for i in range(2, len(ids)):
        best = {int(models[m].next_logits(ids[:i]).argmax()) for m in ("target", "draft")}
        assert ids[i] in best
