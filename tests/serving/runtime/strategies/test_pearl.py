"""PEARL's schedule on scripted models: what is judged, each position once; MAT; stop tokens and
budgets inside a round."""

from __future__ import annotations

import pytest

from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.counters import judged_positions
from tests.support.models.enumeration import distance, joint_law, true_law
from tests.support.models.mutants import Twice
from tests.support.models.resources import ORIGIN, counting_pair, table_pair, table_resources


def pearl(gamma: int | None = 3, ratio: float = 3.0):
    return build_strategy(
        "pearl",
        {} if gamma is None else {"num_speculative_tokens": gamma},
        table_resources(ratio=ratio),
    )


def test_two_full_accepts_then_a_rejection(monkeypatch):
    """gamma 3. The draft counts like the target but errs behind 7.

    Pre-verify keeps 1; post-verify keeps 2 3 | 4 and 5 6 | 7; the next judges 8 9 | 10, of which
    the draft put 0 for the 8: one token is sampled (8). MAT is the run between corrections, not
    accepted tokens per call.
    """
    seen = judged_positions(monkeypatch)
    job = Engine(counting_pair(64, wrong_behind=7)).generate([0], Sampling(max_tokens=8), pearl())
    stats = job.session.stats
    assert job.output == [1, 2, 3, 4, 5, 6, 7, 8]
    assert seen == [1, 2, 3, 4, 5, 6, 7, 0]
    assert (stats.accepted, stats.judged, stats.sampled, stats.target_calls) == (7, 8, 1, 4)
    assert stats.mat == 7.0
    assert stats.accepted_per_call == 7 / 4


@pytest.mark.parametrize("gamma", [1, 2, 3, 5])
def test_every_position_is_judged_once_and_nothing_is_sampled_when_all_is_kept(monkeypatch, gamma):
    seen = judged_positions(monkeypatch)
    job = Engine(counting_pair(64)).generate([0], Sampling(max_tokens=30), pearl(gamma))
    assert job.output == seen == list(range(1, 31))
    assert job.session.stats.sampled == 0


def test_a_rejected_first_token_keeps_it_pre_verifying(monkeypatch):
    """A draft that always errs: every round judges one token and samples the target's own, like
    plain decoding."""
    models = counting_pair(16)
    models["draft"].table = models["draft"].table.roll(1, dims=1)
    seen = judged_positions(monkeypatch)
    job = Engine(models).generate([0], Sampling(max_tokens=10), pearl())
    stats = job.session.stats
    assert job.output == list(range(1, 11))
    assert seen == list(range(2, 12))
    assert (stats.accepted, stats.judged, stats.sampled, stats.target_calls) == (0, 10, 10, 10)
    assert stats.prefill_calls == 1


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_drafted_stop_token_ends_the_text_wherever_it_falls(stop):
    sampling = Sampling(max_tokens=20, stop_token_ids=frozenset({stop}))
    job = Engine(counting_pair()).generate([0], sampling, pearl())
    assert job.output == list(range(1, stop + 1))
    assert job.session.text.finish_reason == "stop"
    assert job.session.stats.sampled == 0


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_budgets_are_kept_exactly(budget, wrong):
    job = Engine(counting_pair(wrong_behind=wrong)).generate(
        [0], Sampling(max_tokens=budget), pearl()
    )
    stats = job.session.stats
    assert job.output == [1, 2, 3, 4, 5][:budget]
    assert stats.emitted == stats.accepted + stats.sampled == budget
    assert job.session.text.finish_reason == "length"


def test_mutant_that_tests_the_next_drafts_first_token_again_is_caught(monkeypatch):
    """x_1 of the next draft is judged by the row behind x_gamma, and never again."""

    models, sampling = table_pair(vocab=2, seed=5), Sampling(max_tokens=4, temperature=1.0)
    truth = true_law(models["target"], [1], sampling)
    assert distance(joint_law(lambda: pearl(2), models, [1], sampling), truth) < 1e-6
    monkeypatch.setattr("draftwell.serving.runtime.strategies.lossless.pearl.Exact", Twice)
    assert distance(joint_law(lambda: pearl(2), models, [1], sampling), truth) > 1e-3


@pytest.mark.parametrize(("ratio", "gamma"), [(0.3, 1), (3.4, 3), (5.6, 6), (1000.0, 32)])
def test_gamma_is_the_speed_ratio_unless_set(ratio, gamma):
    assert pearl(None, ratio).gamma() == gamma
    assert pearl(4, ratio).gamma() == 4


@pytest.mark.parametrize(
    ("t_verify", "gamma"),
    [
        # a processor: a pass over more than eight rows computes longer than it reads weights
        ({1: 40.0, 8: 44.0, 16: 80.0, 32: 140.0}, 8),
        ({1: 6.0, 8: 6.6, 16: 12.0}, 6),
        # a GPU: all sizes that were measured take one pass
        ({1: 40.0, 8: 40.1, 16: 41.0, 32: 43.0}, 32),
        # one size that was timed while something else ran
        ({1: 40.0, 2: 60.0, 4: 41.0}, 32),
    ],
)
def test_a_measured_gamma_is_no_longer_than_a_pass_verifies_at_once(t_verify, gamma):
    profile = HardwareProfile(1.0, t_verify, 0.1, ORIGIN)
    resources = table_resources(hardware_profile=profile)
    for name, field in (("pearl", "num_speculative_tokens"), ("double", "passes")):
        assert build_strategy(name, {}, resources).gamma() == gamma
        assert build_strategy(name, {field: 30}, resources).gamma() == 30
