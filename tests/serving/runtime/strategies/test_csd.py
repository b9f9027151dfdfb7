"""CSD's rescue rule and its memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.runtime.acceptance.rescue import Rescue
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.types import Draft
from tests.support.models.counters import counters
from tests.support.models.enumeration import joint_law, true_law
from tests.support.models.joint_distributions import Context, furthest, law_of_four
from tests.support.models.resources import ORIGIN, table_pair, table_resources
from tests.support.models.spans import decided, span_of

LOGITS = torch.tensor([[0.0, 2.0, 1.0, -9.0], [0.0, 0.0, 3.0, 0.0], [3.0, 0.0, 0.0, 0.0]])


def judge(
    tokens: list[int],
    counts: dict,
    *,
    tau: float = 0.01,
    min_count: float = 6,
    special=frozenset(),
    **sampling,
):
    memory = CorrectionMemory(counts, ORIGIN)
    rule = Rescue(memory, min_count, tau, special)
    rows = span_of(LOGITS[: len(tokens) + 1], Sampling(**sampling))
    return decided(rule.judge(Draft(tokens), rows, Streams(0))), memory


@pytest.mark.parametrize(("count", "rescued"), [(5, 0), (6, 1)])
def test_rescue_needs_lambda_sightings_read_before_the_update(count, rescued):
    verdict, memory = judge([2, 2], {(2, 1): count})
    assert verdict.rescued == rescued
    assert memory.count(2, 1) == count + 1, "every rejection updates, rescued or not"
    assert (verdict.accepted, verdict.token) == ((2, 0) if rescued else (0, 1))


def test_gate_reads_raw_logits_whatever_the_temperature():
    for temperature in (0.0, 0.01):
        verdict, _ = judge([2, 2], {(2, 1): 99}, tau=0.3, temperature=temperature)
        assert verdict.rescued == 1, "z(2) - z(1) = -1 >= log .3 at every temperature"
    verdict, _ = judge([2, 2], {(2, 1): 99}, tau=0.5)
    assert verdict.rescued == 0


@pytest.mark.parametrize("protected", [1, 2])
def test_stop_and_special_tokens_are_neither_rescued_nor_rescued_against(protected):
    assert judge([2], {(2, 1): 99}, special=frozenset({protected}))[0].rescued == 0
    assert judge([2], {(2, 1): 99}, stop_token_ids=frozenset({protected}))[0].rescued == 0


def test_tokens_without_warped_probability_are_not_rescued():
    verdict, _ = judge([2], {(2, 1): 99}, temperature=1.0, top_k=1)
    assert verdict.rescued == 0


def test_a_new_pair_survives_a_full_memory():
    memory = CorrectionMemory({}, ORIGIN, max_pairs=3)
    for pair in [(1, 1), (1, 1), (2, 2), (3, 3), (4, 4)]:
        memory.update(*pair)
    assert memory.counts == {(1, 1): 2, (3, 3): 1, (4, 4): 1}, (
        "the oldest of the least counted goes, never the newest"
    )
    for _ in range(6):
        memory.update(4, 4)
    assert memory.count(4, 4) == 7


def test_new_pairs_that_compete_in_a_full_memory_both_grow():
    memory = CorrectionMemory({(i, i): 5 for i in range(32)}, ORIGIN, max_pairs=32)
    for _ in range(20):
        memory.update(100, 1)
        memory.update(101, 1)
    assert memory.count(100, 1) == memory.count(101, 1) == 20
    assert len(memory.counts) == 32


def test_a_smaller_calibration_keeps_each_rejection_by_chance():
    memory = CorrectionMemory({(i, i + 1): i for i in range(1, 400)}, ORIGIN)
    total = sum(memory.counts.values())
    assert memory.sample(0.0).counts == {}
    assert memory.sample(1.0).counts == memory.counts
    fewer = memory.sample(0.3)
    assert sum(fewer.counts.values()) == pytest.approx(0.3 * total, abs=5 * math.sqrt(0.21 * total))
    assert all(0 < count <= memory.count(*pair) for pair, count in fewer.counts.items())
    assert list(fewer.counts) == [pair for pair in memory.counts if pair in fewer.counts], (
        "the oldest is still the first to go"
    )
    assert memory.sample(0.3).counts == fewer.counts


def test_csd_from_an_empty_memory_learns_over_requests():
    """Not one memory for each request, which would never be asked for anything; and the calibrated
    one is left as it was."""
    models, sampling = (
        table_pair(vocab=8, noise=1.5),
        Sampling(max_tokens=80, temperature=1.0, seed=3),
    )
    resources = replace(
        table_resources(8, correction_memory=CorrectionMemory({(1, 2): 9}, ORIGIN)),
        deterministic=False,
    )
    csd = build_strategy("csd", {"calibration_share": 0.0, "min_count": 2, "tau": 0.01}, resources)
    rescued = [Engine(models).generate([1], sampling, csd).session.stats.rescued for _ in range(3)]
    assert csd.memory.counts
    assert rescued[0] < rescued[2]
    assert resources.artifacts["correction_memory"].counts == {(1, 2): 9}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_rescue_csd_is_vanilla_speculative_decoding(temperature):
    """lambda = inf: the same tokens and counters from the same seed."""
    models, sampling = (
        table_pair(vocab=8, noise=1.5),
        Sampling(max_tokens=80, temperature=temperature, seed=3),
    )
    csd = build_strategy(
        "csd", {"min_count": math.inf, "num_speculative_tokens": 4}, table_resources(8)
    )
    vanilla = build_strategy("vanilla_sd", {"num_speculative_tokens": 4})
    mine, theirs = (Engine(models).generate([1], sampling, strategy) for strategy in (csd, vanilla))
    assert mine.output == theirs.output
    assert counters(mine.session.stats) == counters(theirs.session.stats)


def gated_law(at: Context, tau: float) -> torch.Tensor:
    """Algorithm 1, lines 8-24, at one position with the gate alone: x ~ q, exact test, t* ~
    residual, rescue iff Eq. 3 allows."""
    law = torch.zeros_like(at.p)
    residual = (at.p - at.q).clamp(min=0)
    residual = residual / residual.sum()
    for x in range(len(law)):
        if at.q[x] == 0:
            continue
        kept = min(1.0, float(at.p[x] / at.q[x]))
        law[x] += at.q[x] * kept
        for t in range(len(law)):
            rescue = t != x and at.p[x] > 0 and float(at.z[x] - at.z[t]) >= math.log(tau)
            law[x if rescue else t] += at.q[x] * (1 - kept) * residual[t]
    return law


@pytest.mark.parametrize(
    "warpers",
    [{"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}],
    ids=str,
)
def test_judging_behind_a_rescue_goes_on_with_the_rescued_prefix(warpers):
    """The joint law is Algorithm 1's, position by position: behind a rescued x both test and
    residual use rows that have read x."""
    models, sampling = table_pair(), Sampling(max_tokens=4, **warpers)
    strategy = {"use_memory": False, "tau": 0.3, "num_speculative_tokens": 3}
    law = joint_law(
        lambda: build_strategy("csd", strategy, table_resources()), models, [0], sampling
    )
    assert furthest(law, law_of_four(models, [0], sampling, lambda at: gated_law(at, 0.3))) < 1e-6
    assert furthest(law, true_law(models["target"], [0], sampling)) > 1e-3


def test_a_mutant_that_judges_behind_a_rescue_as_if_the_correction_stood_there_is_caught(
    monkeypatch,
):
    class Elsewhere(Rescue):
        def judge(self, draft, target, rng, *, bonus=True):
            verdict = yield from super().judge(draft, target, rng, bonus=bonus)
            if verdict.rescued and verdict.accepted < len(draft):
                verdict.token = rng.sample.draw(target.probs(verdict.accepted - 1))
            return verdict

    monkeypatch.setattr("draftwell.serving.runtime.strategies.lossy.csd.Rescue", Elsewhere)
    models, sampling = table_pair(), Sampling(max_tokens=4, temperature=1.0)
    strategy = {"use_memory": False, "tau": 0.3, "num_speculative_tokens": 3}
    law = joint_law(
        lambda: build_strategy("csd", strategy, table_resources()), models, [0], sampling
    )
    assert furthest(law, law_of_four(models, [0], sampling, lambda at: gated_law(at, 0.3))) > 1e-4


def test_the_correction_is_drawn_once():
    """One draw serves count, gate and output: at a rejection without rescue the text goes on with
    the token that was counted."""
    models = table_pair(vocab=8, noise=2.0)
    memory = CorrectionMemory.empty(ORIGIN)
    seen = []
    memory.update = lambda drafted, correction: seen.append(correction)
    rule = Rescue(memory, math.inf, 0.01)
    for seed in range(30):
        sampling = Sampling(temperature=1.0, seed=seed)
        draft = Draft([seed % 8], [span_of(models["draft"].next_logits([1, 2])[None], sampling)])
        rows = span_of(models["target"].next_logits([1, 2])[None].repeat(2, 1), sampling)
        verdict = decided(rule.judge(draft, rows, Streams(seed)))
        if verdict.rejected:
            assert seen.pop() == verdict.token
    assert seen == []


def test_a_banned_token_is_not_rescued():
    assert judge([2], {(2, 1): 99}, banned_token_ids=frozenset({2}))[0].rescued == 0


@pytest.mark.parametrize(
    "altered",
    [{"logit_bias": {2: -5.0}}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.0}],
    ids=str,
)
def test_a_request_that_alters_logits_is_neither_rescued_nor_learnt_from(altered):
    verdict, memory = judge([2, 2], {(2, 1): 99}, **altered)
    assert (verdict.rescued, verdict.accepted, verdict.token) == (0, 0, 1)
    assert memory.counts == {(2, 1): 99}


def test_gate_only_at_temperature_zero_keeps_what_the_target_finds_likely():
    models, sampling = table_pair(vocab=8, noise=2.0), Sampling(max_tokens=200)
    job = Engine(models).generate(
        [1], sampling, build_strategy("csd", {"use_memory": False, "tau": 0.2}, table_resources(8))
    )
    assert job.session.stats.rescued > 0
    ids = [1, *job.output]
    for i in range(1, len(ids)):
        logits = models["target"].next_logits(ids[:i])
        assert float(logits[ids[i]] - logits.max()) >= math.log(0.2) - 1e-6
