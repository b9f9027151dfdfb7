"""PyramidSD's throughput model against hand computations and against rounds that were counted; what
it makes of a grid."""

from __future__ import annotations

import pytest
import torch

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.candidates import starting_points
from draftwell.components.tune.search.pyramid_model import (
    ModelAgreement,
    beta_of,
    estimate,
    last_rows,
    measure_agreement,
    predict_pyramids,
    pyramid_throughput,
    shortlist_pyramid,
    stage_throughput,
    time_qualifier,
)
from draftwell.components.tune.search.space import MEASURED, combinations, start
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.models.table_model import TableModel
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyChoice, build_strategy
from draftwell.serving.runtime.strategies.lossy.pyramid import LENGTHS
from tests.support.models.tiny import table_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, device_class="cpu-test")
PROFILE = HardwareProfile(0.01, {1: 0.1, 32: 0.1}, 0.0, ORIGIN)
QUALIFIER = {1: 0.02, 32: 0.02}
PROMPTS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(["hello world", "abc", "so it goes", "xyzzy!"])
]


@pytest.fixture
def pair() -> LoadedPair:
    two = table_pair()
    table = two.models["target"].table  # type: ignore[attr-defined]
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(9))
    two.models["qualifier"] = TableModel(table + 0.4 * noise)
    return two


def test_throughput_by_hand():
    """V_D = 100, V_Q = 50, V_T = 10 per second; l_D = 4, l_Q = 9; beta_QD = .8, beta_TQ = .7."""
    inner = 0.8 * 5 / (4 / 100 + 1 / 50)
    assert inner == pytest.approx(66.6667, abs=1e-3)
    assert stage_throughput(0.8, 4, 100.0, 50.0) == pytest.approx(inner)
    assert pyramid_throughput(0.8, 0.7, 4, 9, 100.0, 50.0, 10.0) == pytest.approx(
        0.7 * 10 / (9 / 66.66667 + 1 / 10), abs=1e-4
    )
    assert pyramid_throughput(0.8, 0.7, 4, 9, 100.0, 50.0, 10.0) == pytest.approx(29.787, abs=1e-3)


def test_beta_is_tokens_per_round_over_length_plus_one():
    assert beta_of(0.5, 3) == pytest.approx((1 + 0.5 + 0.25 + 0.125) / 4)
    assert beta_of(0.0, 4) == pytest.approx(1 / 5), "the judge's own token"
    assert beta_of(1.0, 4) == 1
    coin = torch.Generator().manual_seed(0)
    kept = torch.rand(20000, 6, generator=coin) < 0.7
    tokens = kept.long().cumprod(1).sum(1) + 1
    assert float(tokens.float().mean()) / 7 == pytest.approx(beta_of(0.7, 6), abs=0.005)


def test_the_model_agrees_with_counted_rounds():
    """With the betas that a run counted, and forwards that take 1, 2 and 10 units, the model gives
    the run's own pace."""
    models = {"target": TableModel.random(24, 0, order=1)}
    generator = torch.Generator().manual_seed(1)
    for role, noise in (("draft", 0.5), ("qualifier", 0.3)):
        models[role] = TableModel(
            models["target"].table
            + noise * torch.randn(models["target"].table.shape, generator=generator)
        )
    from draftwell.serving.runtime.engine.engine import Engine

    settings = {
        "num_draft_tokens": 4,
        "num_speculative_tokens": 5,
        "tau_target": 0.1,
        "tau_qualifier": 0.05,
    }
    s = (
        Engine(models)
        .generate(
            [1],
            Sampling(max_tokens=400, temperature=1.0),
            build_strategy("pyramid_fuzzy", settings),
        )
        .session.stats
    )
    outer_rounds = s.target_calls
    beta_target = (s.emitted - 1) / outer_rounds / 6
    inner_tokens = s.inner_accepted + s.inner_sampled
    spent = s.draft_calls * 1 + s.qualifier_calls * 2 + outer_rounds * 10
    # V_FSD as counted: tokens that became ready per unit of inner time
    inner_speed = inner_tokens / (s.draft_calls + 2 * s.qualifier_calls)
    predicted = stage_throughput(beta_target, 5, inner_speed, 1 / 10)
    assert predicted == pytest.approx((s.emitted - 1) / spent, rel=0.02)


def test_agreement_is_measured_on_the_targets_own_text(pair: LoadedPair):
    agreement = measure_agreement(pair, PROMPTS, max_tokens=12)
    assert len(agreement.target) == len(agreement.qualifier) > 12
    assert all(0 <= value <= 0.6932 for value in agreement.target + agreement.qualifier)
    assert 0 < agreement.matches < 1
    assert agreement.share(agreement.target, 1.0) == 1
    assert agreement.share(agreement.target, 0.02) < agreement.share(agreement.target, 0.2)
    ids = pair.encode_prompt("abc")
    rows = last_rows(pair, "target", [*ids, 5, 6], 2)
    expected = [
        pair.models["target"].next_logits(ids),
        pair.models["target"].next_logits([*ids, 5]),
    ]  # type: ignore[attr-defined]
    assert rows.top == [int(logits.argmax()) for logits in expected]
    assert len(pair.models["qualifier"].slots._free) == 8  # type: ignore[attr-defined]
    pair.models["qualifier"] = pair.models["target"]
    same = measure_agreement(pair, PROMPTS[:1], max_tokens=8)
    assert max(same.target) < 1e-6


def test_predictions_order_lengths_as_the_formula_says():
    alike = ModelAgreement([0.0] * 100, [0.0] * 100, 1.0)
    best = shortlist_pyramid("pyramid_assisted", alike, PROFILE, QUALIFIER)
    assert {trial.parameters["num_speculative_tokens"] for trial in best} == {max(LENGTHS)}, (
        "all is kept: longer is faster"
    )
    apart = ModelAgreement([0.6] * 100, [0.6] * 100, 0.0)
    best = shortlist_pyramid("pyramid_fuzzy", apart, PROFILE, QUALIFIER)
    assert {trial.parameters["num_speculative_tokens"] for trial in best} == {1}, (
        "nothing is kept: shorter is faster"
    )
    mixed = ModelAgreement([0.1] * 60 + [0.35] * 20 + [0.6] * 20, [0.1] * 70 + [0.6] * 30, 0.7)
    best = shortlist_pyramid("pyramid_fuzzy", mixed, PROFILE, QUALIFIER)
    assert sorted(trial.parameters["tau_target"] for trial in best) == [0.2, 0.3, 0.4, 0.5]
    times = [trial.predicted_seconds_per_token for trial in best]
    assert times == sorted(times)
    assert not any(trial.exact for trial in best)
    by_hand = pyramid_throughput(beta_of(0.7, 2), beta_of(0.6, 4), 2, 4, 100.0, 50.0, 10.0)
    config = {
        "num_draft_tokens": 2,
        "num_speculative_tokens": 4,
        "tau_target": 0.2,
        "tau_qualifier": 0.2,
    }
    assert estimate(
        StrategyChoice("pyramid_fuzzy", config), mixed, PROFILE, QUALIFIER
    ).predicted_seconds_per_token == pytest.approx(1 / by_hand)


def test_the_grid_has_ordered_thresholds_and_half_lengths():
    points = [choice.parameters for choice in combinations("pyramid_fuzzy")]
    assert len(points) == 10 * 10  # ten lengths, ten pairs tau_Q <= tau_T
    assert all(p["tau_qualifier"] <= p["tau_target"] for p in points)
    assert {(p["num_speculative_tokens"], p["num_draft_tokens"]) for p in points} >= {
        (1, 1),
        (2, 1),
        (10, 5),
        (25, 12),
    }
    assert start("pyramid_fuzzy", MEASURED["pyramid_fuzzy"]).parameters == {
        "num_speculative_tokens": 10,
        "tau_target": 0.3,
        "tau_qualifier": 0.2,
        "num_draft_tokens": 5,
    }


def test_the_tuner_begins_with_what_is_predicted(pair: LoadedPair):
    assert predict_pyramids(pair, ["vanilla_sd", "csd"], PROMPTS, PROFILE) == []
    names = ["vanilla_sd", "csd", "pyramid_assisted"]
    estimates = predict_pyramids(pair, names, PROMPTS, PROFILE)
    first = starting_points(estimates)
    assert {name: len(configs) for name, configs in first.items()} == {"pyramid_assisted": 4}
    for choice in first["pyramid_assisted"]:
        build_strategy(choice.name, dict(choice.parameters))
    assert min(time_qualifier(pair).values()) > 0
