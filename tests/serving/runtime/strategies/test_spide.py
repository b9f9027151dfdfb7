"""SPIDE's schedule on scripted models: what is judged, each position once; stop tokens and budgets
inside a round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftwell.serving.artifacts.acceptance_table import EDGES, MIDPOINTS, AcceptanceTable
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.errors import raises_code
from tests.support.models.counters import counters, judged_positions
from tests.support.models.resources import (
    ORIGIN,
    counting_pair,
    decode,
    table_pair,
    table_resources,
)


def certain_table() -> AcceptanceTable:
    """alpha = 1 nearly: a million accepted tokens in every bin."""
    return AcceptanceTable([10**6] * 20, [10**6] * 20, ORIGIN)


@pytest.mark.parametrize("ratio", [1.0, 4.0])
def test_every_position_is_judged_once_when_all_is_kept(monkeypatch, ratio):
    seen = judged_positions(monkeypatch)
    resources = table_resources(
        acceptance_table=certain_table(),
        hardware_profile=table_resources(ratio=ratio).artifacts["hardware_profile"],
    )
    job = decode(counting_pair(64), [0], "spide", {"max_draft": 4}, resources, max_tokens=30)
    assert job.output == list(range(1, 31))
    sampled = set(job.output) - set(seen)
    assert len(seen) == len(set(seen)), "a position was judged twice"
    assert len(sampled) == job.session.stats.sampled


def test_stop_token_inside_a_draft_ends_the_text_without_a_bonus():
    resources = table_resources(acceptance_table=certain_table())
    sampling = Sampling(max_tokens=20, stop_token_ids=frozenset({4}))
    job = Engine(counting_pair()).generate([0], sampling, build_strategy("spide", {}, resources))
    assert job.output == [1, 2, 3, 4]
    assert job.session.text.finish_reason == "stop"
    assert job.session.stats.accepted + job.session.stats.sampled == 4


@pytest.mark.parametrize("budget", [1, 2, 4, 5])
@pytest.mark.parametrize("wrong", [None, 2])
def test_budgets_are_kept_exactly(budget, wrong):
    resources = table_resources(ratio=4.0, acceptance_table=certain_table())
    job = decode(counting_pair(wrong_behind=wrong), [0], "spide", {}, resources, max_tokens=budget)
    assert job.output == [1, 2, 3, 4, 5][:budget]
    assert (
        job.session.stats.emitted
        == job.session.stats.accepted + job.session.stats.sampled
        == budget
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tau_zero_is_a_fixed_length_at_the_cap(temperature):
    """Whatever the table has learnt, tau = 0 drafts to the cap every time, like a fixed gamma
    there."""
    models, sampling = (
        table_pair(vocab=8, noise=0.5),
        Sampling(max_tokens=60, temperature=temperature, seed=1),
    )
    dynamic = Engine(models).generate(
        [1],
        sampling,
        build_strategy(
            "spide", {"tau": 0.0, "max_draft": 3, "parallel": False}, table_resources(8)
        ),
    )
    fixed = Engine(models).generate(
        [1], sampling, build_strategy("vanilla_sd", {"num_speculative_tokens": 3})
    )
    assert dynamic.output == fixed.output
    assert counters(dynamic.session.stats) == counters(fixed.session.stats)


def test_a_continuation_that_is_unlikely_to_be_kept_ends_early(monkeypatch):
    """alpha is below .1 in every bin: a continuation ends behind its first token; serial drafts are
    as they were."""
    resources = table_resources(
        ratio=8.0, acceptance_table=AcceptanceTable([100] * 20, [0] * 20, ORIGIN)
    )
    lengths: dict[bool, list[int]] = {}
    original = DraftModel.propose

    def spy(self, session, limit, pending=None):
        draft = yield from original(self, session, limit, pending)
        lengths.setdefault(pending is not None, []).append(len(draft))
        return draft

    monkeypatch.setattr(DraftModel, "propose", spy)
    drafted = {}
    for overlap_tau in (0.0, 0.5):
        lengths.clear()
        strategy = build_strategy(
            "spide", {"tau": 0.001, "overlap_tau": overlap_tau}, resources.private()
        )
        job = Engine(counting_pair(64, wrong_behind=10)).generate(
            [0], Sampling(max_tokens=30), strategy
        )
        assert job.output == list(range(1, 31))
        drafted[overlap_tau] = {name: list(found) for name, found in lengths.items()}
    assert max(drafted[0.0][True]) > 1
    assert set(drafted[0.5][True]) == {1}
    assert max(drafted[0.5][False]) > 1


def test_a_shorter_continuation_needs_a_continuation():
    for settings in ({"parallel": False}, {"dynamic": False}):
        with raises_code("bad_parameter", "overlap_tau"):
            build_strategy("spide", {"overlap_tau": 0.1, **settings}, table_resources())


def test_only_judged_tokens_update_the_table():
    table = AcceptanceTable.empty(ORIGIN)
    resources = table_resources(acceptance_table=table)
    resources = type(resources)(resources.artifacts, deterministic=False)
    job = decode(counting_pair(wrong_behind=5), [0], "spide", {}, resources, max_tokens=20)
    assert sum(table.total) == job.session.stats.judged
    assert sum(table.accepted) == job.session.stats.accepted


def test_a_table_that_does_not_learn_stays_as_it_was_calibrated():
    table = AcceptanceTable([4] * 20, [1] * 20, ORIGIN)
    resources = replace(table_resources(acceptance_table=table), deterministic=False)
    decode(counting_pair(), [0], "spide", {"learns": False}, resources, max_tokens=20)
    assert (sum(table.total), sum(table.accepted)) == (80, 20)


def test_a_table_from_nothing_learns_over_requests_and_leaves_the_calibrated_one_alone():
    table = AcceptanceTable([100] * 20, [0] * 20, ORIGIN)
    resources = replace(table_resources(acceptance_table=table), deterministic=False)
    calibrated, strategy = (
        build_strategy("spide", {"parallel": False, **settings}, resources)
        for settings in ({"learns": False}, {"calibrated": False})
    )
    calls = [
        Engine(counting_pair())
        .generate([0], Sampling(max_tokens=20), one)
        .session.stats.target_calls
        for one in (calibrated, strategy)
    ]
    assert calls[0] > calls[1], "a table in which nothing was ever kept ends every draft at once"
    judged = sum(strategy.table.total)
    Engine(counting_pair()).generate([0], Sampling(max_tokens=20), strategy)
    assert 0 < judged < sum(strategy.table.total)
    assert sum(table.total) == 2000


def test_deterministic_mode_leaves_the_shared_table_alone():
    resources = table_resources()
    decode(counting_pair(), [0], "spide", {}, resources, max_tokens=20)
    assert sum(resources.artifacts["acceptance_table"].total) == 0


def test_bins_and_prior():
    assert len(EDGES) == 19
    assert len(MIDPOINTS) == 20
    bins = [
        AcceptanceTable.bin_of(c)
        for c in (0.0, 0.0999, 0.1, 0.8999, 0.9, 0.985, 0.99, 0.9979, 1 - 2**-9, 1.0)
    ]
    assert bins == [0, 0, 1, 8, 9, 17, 18, 18, 19, 19]
    table = AcceptanceTable.empty(ORIGIN)
    assert table.alpha(1.0) == pytest.approx(0.999)
    for _ in range(90):
        table.update(0.55, kept=False)
    assert table.alpha(0.55) == pytest.approx(10 * 0.55 / 100)


def test_thresholds_read_raw_confidence_not_the_greedy_one_hot():
    """At temperature 0 a warped distribution is one-hot; C from it would be 1 and drafts would run
    to the cap."""
    models = table_pair(vocab=8, noise=0.2, sharpness=0.5)
    job = decode(
        models, [1], "spide", {"tau": 0.7, "parallel": False}, table_resources(8), max_tokens=50
    )
    stats = job.session.stats
    assert stats.drafted / stats.rounds < 3


CURVE = {1: 12.0, 8: 13.2, 16: 24.0, 32: 42.0}
"""Seconds of a processor's target passes, where a draft pass takes one: over more than eight
tokens they take longer than one pass does."""


@pytest.mark.parametrize(
    ("t_verify", "unverified", "steps"),
    [
        (CURVE, 3, 8),
        (CURVE, 31, 8),  # 42 draft steps fit, and the next verification would read 32
        ({1: 4.0, 7: 5.0, 16: 9.0}, 0, 4),
        ({1: 4.0, 7: 5.0, 16: 9.0}, 6, 5),  # a longer verification gives more time
        ({1: 12.0, 32: 13.0}, 0, 12),  # a GPU: any length takes one pass
        ({1: 0.4}, 3, 1),
    ],
)
def test_a_continuation_is_no_longer_than_a_pass_verifies_at_once(t_verify, unverified, steps):
    profile = HardwareProfile(1.0, t_verify, 0.1, ORIGIN)
    spide = build_strategy("spide", {}, table_resources(hardware_profile=profile))
    assert spide.overlap_steps(profile, unverified) == steps


@pytest.mark.parametrize("unverified", [0, 3, 31])
def test_with_a_longest_draft_the_continuation_is_equation_6s(unverified):
    profile = HardwareProfile(1.0, CURVE, 0.1, ORIGIN)
    for longest, steps in ((32, 12), (4, 4)):
        resources = table_resources(hardware_profile=profile)
        spide = build_strategy("spide", {"max_draft": longest}, resources)
        assert spide.overlap_steps(profile, unverified) == steps
        assert spide.longest_draft == longest


def test_the_bound_holds_while_decoding(monkeypatch):
    """Everything is kept: after the serial draft each verification judges one continuation."""
    profile = HardwareProfile(1.0, {1: 12.0, 3: 12.0, 4: 24.0}, 0.1, ORIGIN)
    resources = table_resources(acceptance_table=certain_table(), hardware_profile=profile)
    job = decode(counting_pair(64), [0], "spide", {"tau": 1.0}, resources, max_tokens=30)
    stats = job.session.stats
    assert job.output == list(range(1, 31))
    # the prompt's pass gives 1, a serial draft of one with the next token 2, then 3 each time
    assert stats.target_calls == 1 + 9
