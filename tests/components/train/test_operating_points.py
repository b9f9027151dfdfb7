"""Scores at an equal run length and an equal η_FP: counted as a walk along the texts counts them,
and as SPRINTER then does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.train.operating_points import (
    OperatingPoint,
    ScoredTokens,
    compare,
    confidence_rule,
    difference,
    scored_tokens,
)
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.loop.verifier_trace import ORIGIN, trace
from tests.support.models.resources import table_resources
from tests.support.models.tiny import VOCAB, table_pair


def walked(tokens: ScoredTokens, threshold: float) -> float:
    """The run length by a walk along the texts, one token after the other."""
    run = calls = 0
    stay = 0.0
    for score, begins, accepted in zip(tokens.score, tokens.begins, tokens.accepted, strict=True):
        run = 0 if begins else run
        if score >= threshold and run + 1 < tokens.max_run:
            run += 1
            stay += 1
        else:
            calls += 1
            stay += accepted
            run = 0
    return stay / calls if calls else float("inf")


def random_tokens(seed: int, rows: int = 300, max_run: int = 4) -> ScoredTokens:
    rng = np.random.default_rng(seed)
    begins = rng.random(rows) < 0.05
    begins[0] = True
    return ScoredTokens(
        rng.random(rows),
        begins,
        rng.random(rows).astype(np.float32),
        (rng.random(rows) < 0.5).astype(np.float64),
        np.sort(rng.integers(0, 7, rows)),
        max_run,
    )


@pytest.mark.parametrize("seed", range(4))
def test_run_lengths_are_those_of_a_walk_along_the_texts(seed):
    tokens = random_tokens(seed)
    for threshold in (0.0, 0.1, 0.5, 0.9, 1.1):
        assert tokens.at(threshold).run_length == pytest.approx(walked(tokens, threshold))
    assert tokens.at(1.1).run_length == pytest.approx(tokens.accepted.mean())
    whole = replace(tokens, max_run=1000, begins=np.arange(300) == 0)
    assert whole.at(0.0).run_length == float("inf")


def test_rates_are_shares_of_the_tokens_to_be_rejected_and_of_the_others():
    score, rejected = np.array([0.9, 0.8, 0.4, 0.2]), np.array([0.0, 1.0, 1.0, 0.0])
    prompt = np.zeros(4, int)
    tokens = ScoredTokens(score, np.arange(4) == 0, np.zeros(4, np.float32), rejected, prompt)
    assert tokens.at(0.5)[2:] == (0.5, 0.5)
    assert tokens.at(0.85)[2:] == (0.0, 0.5)


def test_at_equal_cost_the_better_score_lets_fewer_bad_tokens_pass_or_asks_less_often():
    """One score knows which tokens are bad but for noise, the other hardly. At τ = 0.5 the
    better one would look worse by run length, because its scores are low."""
    rng = np.random.default_rng(0)
    rejected = (rng.random(4000) < 0.4).astype(np.float64)
    begins, accepted = np.arange(4000) % 50 == 0, (1 - 0.8 * rejected).astype(np.float32)

    def tokens(noise: float, level: float) -> ScoredTokens:
        score = 0.2 * (1 - rejected) + noise * rng.random(4000) + level
        return ScoredTokens(score, begins, accepted, rejected, begins.cumsum())

    both = {"verifier": tokens(0.2, 0.05), "confidence": tokens(0.6, 0.1)}
    assert both["verifier"].at(0.5).run_length < both["confidence"].at(0.5).run_length
    found = compare(both, run_length=3.0, eta_fp=0.1)
    for point in found.at_run_length.values():
        assert point.run_length == pytest.approx(3.0, abs=0.05)
    for point in found.at_eta_fp.values():
        assert point.eta_fp == pytest.approx(0.1, abs=0.005)

    def pair_of(points: dict[str, OperatingPoint]) -> tuple[OperatingPoint, OperatingPoint]:
        return points["verifier"], points["confidence"]

    verifier, confidence = pair_of(found.at_run_length)
    assert verifier.eta_fp is not None
    assert confidence.eta_fp is not None
    assert verifier.eta_fp < confidence.eta_fp - 0.1
    value, low, high = difference(
        "eta_fp", (both["verifier"], verifier), (both["confidence"], confidence)
    )
    assert value == pytest.approx(verifier.eta_fp - confidence.eta_fp)
    assert low < value < high < 0, "over 80 prompts the verifier is better beyond chance"
    verifier, confidence = pair_of(found.at_eta_fp)
    assert verifier.run_length > confidence.run_length * 1.5
    same = (both["verifier"], verifier)
    assert difference("run_length", same, same) == (0.0, 0.0, 0.0)


def test_the_confidence_rule_ranks_by_confidence():
    table = trace(rows=400, prompts=8, matches=0.5)
    table = table.append_column("position", [np.arange(400) % 50])
    scored = scored_tokens(table, {"confidence": confidence_rule(ORIGIN)})["confidence"]
    order = np.argsort(table.column("confidence").to_numpy(), kind="stable")
    assert (np.diff(scored.score[order]) >= 0).all()
    assert scored.begins.sum() == 8


def test_sprinter_has_the_run_length_that_its_threshold_was_chosen_for(tmp_path: Path):
    pair = table_pair(slots=8)
    prompts = [Prompt(f"p{i}", None, [f"prompt {i}"]) for i in range(12)]
    traced = collect_traces(
        pair,
        prompts,
        tmp_path / "trace",
        max_tokens=60,
        hidden=False,
        temperature=1.0,
        prefix_kinds=("target", "mixed"),
    )
    rule = confidence_rule(ORIGIN)
    scored = scored_tokens(traced, {"confidence": rule}, kinds=("mixed",))["confidence"]
    assert scored.begins.sum() == 12
    for wanted in (1.5, 4.0):
        point = scored.at_run_length(wanted)
        # behind one token the draft is always equally sure: 24 thresholds
        assert point.run_length == pytest.approx(wanted, abs=0.5)
        strategy = build_strategy(
            "sprinter", {"tau": point.threshold}, table_resources(VOCAB, verifier=rule)
        )
        stats = Stats.total(
            Engine(pair.models)
            .generate([3 + i, 4], Sampling(max_tokens=200, temperature=1.0, seed=i), strategy)
            .session.stats
            for i in range(6)
        )
        assert stats.accepted / stats.target_calls == pytest.approx(point.run_length, rel=0.2)
    with raises_code("empty_trace", "kind draft", "prefix_kinds=draft"):
        scored_tokens(traced, {"confidence": rule}, kinds=("draft",))
    states = Verifier(torch.ones(8), 0.0, ("before",), 0.5, 1.2, ORIGIN)
    with raises_code("no_hidden_states", "before"):
        scored_tokens(traced, {"verifier": states})
