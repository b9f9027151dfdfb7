"""The draft length that is fastest under load, by made-up machines whose answer is known, and on
costs that are measured."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from draftwell.serving.artifacts.forward_costs import seconds_at
from draftwell.serving.artifacts.hardware_profile import (
    HardwareProfile,
    RequestTimes,
    RoundOverheads,
)
from draftwell.serving.server.scheduling.costs import (
    LONGEST,
    BatchCosts,
    completed,
    from_profile,
    measure,
)
from tests.support.models.resources import ORIGIN, table_pair

WEIGHTS = 0.040
"""Seconds in which the machine below reads the target's weights."""


def machine(per_token: float, t_draft: float = 0.004, **settings) -> BatchCosts:
    """A machine that reads weights in `WEIGHTS` and then computes each token in `per_token`
    seconds."""
    return BatchCosts(
        {1: t_draft, 64: t_draft * 2},
        {1: WEIGHTS + per_token, 1024: WEIGHTS + 1024 * per_token},
        **settings,
    )


FREE, DEAR = machine(0.0), machine(WEIGHTS)
"""Reading weights is all it does; it computes a token no faster than it reads all weights."""


@pytest.mark.parametrize("running", [1, 2, 8, 64])
def test_where_verification_is_free_drafts_stay(running):
    assert FREE.best_gamma(running, 0.8) >= 4


@pytest.mark.parametrize("running", [2, 8, 64])
def test_where_the_target_computes_all_the_time_nobody_drafts(running):
    assert DEAR.best_gamma(running, 0.7) == 0


def test_drafts_shorten_step_by_step_until_none_is_left():
    usual = machine(0.004)
    lengths = [usual.best_gamma(running, 0.8) for running in (1, 2, 4, 8, 16, 32, 64, 256)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 3
    assert lengths[-1] == 0
    assert len(set(lengths)) >= 3, "it is no switch"


@given(
    per_token=st.floats(0, 0.05),
    t_draft=st.floats(0.0005, 0.03),
    alpha=st.floats(0, 0.98),
    running=st.integers(1, 128),
    drafts=st.booleans(),
    prompt=st.floats(0, 20),
)
def test_the_choice_is_never_predicted_slower_than_plain_decoding_and_moves_the_right_way(
    per_token, t_draft, alpha, running, drafts, prompt
):
    costs, so = machine(per_token, t_draft), {"drafts": drafts, "prompt": prompt}
    best = costs.best_gamma(running, alpha, **so)
    plain = costs.seconds_per_token(running, 0, alpha, **so)
    assert costs.seconds_per_token(running, best, alpha, **so) <= plain
    assert (
        all(
            costs.seconds_per_token(running, best, alpha, **so)
            <= costs.seconds_per_token(running, other, alpha, **so) + 1e-12
            for other in range(LONGEST + 1)
        )
        or best == 0
    )
    assert costs.best_gamma(running, min(0.99, alpha + 0.1), **so) >= best, (
        "better drafts are no reason for shorter ones"
    )
    assert costs.best_gamma(running + 8, alpha, **so) <= best, (
        "more load is no reason for longer ones"
    )
    assert costs.best_gamma(running, alpha, drafts=False, prompt=prompt) >= best, (
        "nor are drafts that cost nothing"
    )
    assert costs.best_gamma(running, alpha, drafts=drafts, prompt=prompt + 1) <= best, (
        "nor more prompt to read"
    )


def test_a_draft_that_saves_next_to_nothing_is_not_worth_it():
    barely = BatchCosts({1: 0.0}, {1: 1.0, 2: 1.68, 33: 40.0})
    assert barely.seconds_per_token(1, 1, 0.7) < barely.seconds_per_token(1, 0, 0.7)
    assert barely.best_gamma(1, 0.7) == 0


def test_an_overlapped_draft_costs_only_what_outlasts_the_verification():
    costs = BatchCosts({1: 1.0}, {1: 4.0})
    assert costs.round_seconds(1, 3) == 7.0
    assert costs.round_seconds(1, 3, overlaps=True) == 4.0
    assert costs.round_seconds(1, 6, overlaps=True) == 6.0
    split = BatchCosts({1: 1.0}, {1: 4.0}, split=({1: 2.0}, {1: 6.0}))
    assert split.round_seconds(1, 2, overlaps=True) == 6.0
    assert split.round_seconds(1, 0, overlaps=True) == 4.0, "who does not draft has all cores"


def test_a_model_that_runs_row_by_row_gains_from_drafts_at_any_load():
    costs = machine(0.004, batched=False)
    assert costs.best_gamma(16, 0.8) == costs.best_gamma(1, 0.8) > 0
    assert costs.round_seconds(16, 2) == pytest.approx(16 * costs.round_seconds(1, 2))


def profile(details: bool = True) -> HardwareProfile:
    more = RequestTimes(
        t_draft={1: 0.01, 8: 0.02},
        prefill={"target": {16: 0.01, 256: 10.0}, "draft": {}},
        per_context_token={},
        context=128,
        rest=RoundOverheads(round=0.001, token=0.0005, figure=0.0002),
    )
    return HardwareProfile(
        0.01,
        {1: 0.1, 8: 0.1, 32: 0.2},
        0.003,
        ORIGIN,
        split=(0.02, {1: 0.15, 32: 0.3}),
        details=more if details else None,
    )


def test_a_profile_gives_costs_and_what_it_lacks_is_continued():
    costs = from_profile(profile())
    assert (seconds_at(costs.draft, 8), seconds_at(costs.target, 32)) == (0.02, 0.2)
    assert seconds_at(costs.target, 256) == 10.0, (
        "a verification takes no less than a prompt of that size, whatever small ones suggest"
    )
    assert (costs.per_round, costs.per_token) == pytest.approx((0.001, 0.0007))
    assert costs.split is not None
    assert (seconds_at(costs.split[0], 8), seconds_at(costs.split[1], 1)) == pytest.approx(
        (0.04, 0.15)
    )
    old = from_profile(profile(details=False))
    assert (
        seconds_at(old.draft, 1),
        seconds_at(old.draft, 32),
        old.per_round,
        old.per_token,
    ) == pytest.approx((0.01, 0.02, 0.0, 0.0006))
    assert seconds_at(old.target, 256) > 0.2


def test_noise_does_not_make_drafts_look_better_than_free() -> None:
    """Timed on a busy machine, one token took longer than two: that is no reason to draft."""
    noisy = HardwareProfile(0.027, {1: 0.115, 2: 0.092, 4: 0.148}, 0.0, ORIGIN)
    assert seconds_at(from_profile(noisy).target, 1) == 0.092


def test_timed_batches_count_and_the_profile_tells_the_rest():
    """A profile knows one request's forwards: here eight rows take twice as long as eight tokens of
    one."""
    timed = BatchCosts({1: 0.02, 8: 0.04}, {1: 0.2, 8: 0.4}, source="measured at start")
    costs = completed(timed, from_profile(profile()))
    assert (
        seconds_at(costs.draft, 8),
        seconds_at(costs.target, 1),
        seconds_at(costs.target, 8),
    ) == (0.04, 0.2, 0.4)
    assert seconds_at(costs.target, 32) == pytest.approx(0.4 * 0.2 / 0.1), (
        "grows as the profile does"
    )
    assert (costs.per_round, costs.per_token) == pytest.approx((0.001, 0.0007))
    assert costs.split is not None
    split = (seconds_at(costs.split[0], 1), seconds_at(costs.split[1], 1))
    assert split == pytest.approx((0.02 * 2, 0.2 * 1.5)), "as much slower as in the profile"
    old = completed(timed, from_profile(profile(details=False)))
    assert (old.per_round, old.per_token) == pytest.approx((0.0, 0.0006))
    alone = completed(BatchCosts({1: 0.0}, {1: 0.2, 8: 0.4}), from_profile(profile()))
    assert seconds_at(alone.draft, 32) == 0.0, "without a draft nothing grows"


def test_a_draft_reads_every_prompt_which_plain_decoding_does_not():
    """Short answers to long prompts: what the draft saves in writing it has lost in reading."""
    costs = BatchCosts({1: 0.002, 101: 0.102}, {1: 0.030, 8: 0.033, 16: 0.041, 64: 0.09})
    assert costs.seconds_to_read == pytest.approx(0.001)
    assert costs.best_gamma(8, 0.7) >= 1
    assert costs.best_gamma(8, 0.7, prompt=10) == 0
    assert costs.best_gamma(8, 0.7, drafts=False, prompt=10) >= 1, "n-grams read nothing"
    assert costs.seconds_per_token(8, 1, 0.7, prompt=2) - costs.seconds_per_token(
        8, 1, 0.7
    ) == pytest.approx(8 * 2 * 0.001)
    assert costs.seconds_per_token(8, 0, 0.7, prompt=2) == costs.seconds_per_token(8, 0, 0.7)


def test_costs_are_measured_and_every_slot_comes_back():
    models = table_pair(vocab=8)
    costs = measure({"target": models["target"], "draft": models["draft"]}, slots=4)
    assert list(costs.target) == [1, 4, 16, 32]
    assert list(costs.draft) == [1, 4, 16, 32], "as large as a prompt that is read"
    assert min(*costs.target.values(), *costs.draft.values()) > 0
    assert {len(model.slots._free) for model in models.values()} == {8}
    hurried = measure({"target": models["target"]}, slots=4, seconds=0.0)
    assert list(hurried.target) == [1], "a slow model is not measured at length"
