"""The papers' formulas against enumeration and simulation."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from draftwell.components.papers import formulas
from draftwell.components.papers.tables import papers_named

FLAT = {1: 1.0, 64: 1.0}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [1, 3])
def test_expected_tokens_by_enumeration(alpha: float, gamma: int) -> None:
    expected = 0.0
    for kept in itertools.product((True, False), repeat=gamma):
        chance = np.prod([alpha if k else 1 - alpha for k in kept])
        expected += chance * (1 + next((i for i, k in enumerate(kept) if not k), gamma))
    assert formulas.expected_tokens(alpha, gamma) == pytest.approx(expected)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.68, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [1, 6, 11])
def test_a_tokens_chance_is_found_from_what_rounds_accept(alpha: float, gamma: int) -> None:
    """By the sum itself: α + α² + … + α^γ."""
    accepted = sum(alpha**i for i in range(1, gamma + 1))
    assert formulas.token_acceptance(accepted, gamma) == pytest.approx(alpha, abs=1e-6)


def test_a_round_cannot_accept_more_than_it_drafts() -> None:
    with pytest.raises(ValueError, match="cannot accept"):
        formulas.token_acceptance(4.5, 4)


def test_measured_passes_that_cost_what_leviathan_assumes_give_his_formula() -> None:
    for alpha, gamma, c in ((0.5, 2, 0.05), (0.9, 8, 0.2)):
        assert formulas.sd_speedup(alpha, gamma, 1.0, c, FLAT) == pytest.approx(
            formulas.leviathan_speedup(alpha, gamma, c)
        )


def test_the_best_gamma_grows_with_acceptance() -> None:
    found = [formulas.best_gamma(alpha, 0.05, FLAT) for alpha in (0.2, 0.5, 0.8, 0.95)]
    assert found == sorted(found)
    assert found[0] < 3 < found[-1]
    speeds = [formulas.leviathan_speedup(0.8, gamma, 0.05) for gamma in range(1, 33)]
    assert found[2] == 1 + speeds.index(max(speeds))


@pytest.mark.parametrize("tokens", [1, 2, 20, 63])
@pytest.mark.parametrize(
    ("alpha", "tau", "draft"),
    [(0.5, 0.7, 0.06), (0.8, 0.7, 0.06), (0.95, 0.5, 0.25), (0.8, 0.9, 0.5), (0.6, 0.7, 0.01)],
)
def test_spides_seconds_by_simulation(alpha: float, tau: float, draft: float, tokens: int) -> None:
    """Algorithm 1, token by token: what is left of a window after x_{k+1} was tested is tested next
    time, and nothing twice."""
    alone, busy = (draft, {1: 1.0, 32: 2.0}), (1.5 * draft, {1: 1.2, 32: 2.6})
    rng, runs = random.Random(7), 4_000
    seconds = 0.0
    for _ in range(runs):
        left = tokens
        while left > 0:
            pending, chance = 0, 1.0
            while pending < min(32, left - 1):
                pending, chance = pending + 1, chance * alpha
                seconds += alone[0]
                if chance <= tau + 1e-12:
                    break
            while True:
                took = 1.2 + 1.4 * pending / 31
                steps = min(32, max(1, int(took / busy[0])), left - pending)
                judged = pending + (steps > 0)
                seconds += max(took, steps * busy[0]) if steps else 1.0 + pending / 31
                kept = next((i for i in range(judged) if rng.random() >= alpha), judged)
                left -= kept + (kept < judged or not steps)
                if kept < judged or not steps or left <= 0:
                    break
                pending = steps - 1
    assert formulas.spide_seconds(tokens, alpha, tau, alone, busy) == pytest.approx(
        seconds / runs, rel=0.02
    )


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_sds_seconds_by_simulation(tokens: int) -> None:
    """No draft goes beyond the text, and its last token is the target's."""
    rng, runs, seconds, (alpha, gamma, draft, rest) = (
        random.Random(5),
        4_000,
        0.0,
        (0.7, 5, 0.1, 0.02),
    )
    for _ in range(runs):
        left = tokens
        while left > 0:
            drafted = min(gamma, left - 1)
            seconds += drafted * draft + 1 + 0.1 * drafted + rest
            left -= 1 + next((i for i in range(drafted) if rng.random() >= alpha), drafted)
    verify = {1: 1.0, 11: 2.0}
    assert formulas.sd_seconds(tokens, alpha, gamma, (draft, verify), rest) == pytest.approx(
        seconds / runs, rel=0.02
    )


def test_long_texts_come_to_leviathans_formula() -> None:
    """Whose rounds have no end to keep away from."""
    alpha, gamma, draft = 0.8, 4, 0.2
    plain, long = 2_000 * 1.0, formulas.sd_seconds(2_000, alpha, gamma, (draft, FLAT))
    assert plain / long == pytest.approx(formulas.leviathan_speedup(alpha, gamma, draft), rel=0.005)


def test_spide_gains_nothing_where_nothing_is_kept_and_more_the_more_is_kept() -> None:
    """With α = 0 each cycle is one draft and one verification, as SD's with γ = 1."""
    times = 0.06, FLAT
    assert formulas.spide_seconds(200, 0.0, 0.7, times, times) == pytest.approx(
        formulas.sd_seconds(200, 0.0, 1, times), rel=0.01
    )
    best = {alpha: formulas.best_gamma(alpha, *times) for alpha in (0.5, 0.8, 0.9)}
    gains = [
        formulas.sd_seconds(500, alpha, gamma, times)
        / formulas.spide_seconds(500, alpha, 0.7, times, times)
        for alpha, gamma in best.items()
    ]
    assert gains == sorted(gains)
    assert gains[-1] > 1.1


def runs(
    true_positive: float, false_positive: float, acceptable: int, count: int = 40_000
) -> list[int]:
    """Draft tokens that a verifier accepts before it first rejects."""
    rng = random.Random(11)
    found = []
    for _ in range(count):
        length = 0
        while rng.random() < (true_positive if length < acceptable else false_positive):
            length += 1
        found.append(length)
    return found


@pytest.mark.parametrize(
    ("true_positive", "false_positive", "acceptable"),
    [(0.9, 0.1, 5), (0.5, 0.5, 3), (0.99, 0.7, 1), (0.8, 0.0, 4)],
)
def test_theorems_3_3_and_3_4_by_simulation(
    true_positive: float, false_positive: float, acceptable: int
) -> None:
    lengths = runs(true_positive, false_positive, acceptable)
    arguments = true_positive, false_positive, acceptable
    assert formulas.expected_run(*arguments) == pytest.approx(np.mean(lengths), rel=0.03)
    assert formulas.expected_stop(*arguments, 0.25) == pytest.approx(
        0.25 * (np.mean(lengths) + 1), rel=0.03
    )


def test_theorem_3_4_is_the_papers_closed_form() -> None:
    """Eq. 4 as it is printed."""
    true_positive, false_positive, acceptable, seconds = 0.85, 0.3, 6, 0.1
    printed = (1 - true_positive**acceptable) * seconds / (
        1 - true_positive
    ) + true_positive**acceptable * seconds / (1 - false_positive)
    assert formulas.expected_stop(
        true_positive, false_positive, acceptable, seconds
    ) == pytest.approx(printed)


@pytest.mark.parametrize("false_positive", [0.0, 0.2, 1.0])
def test_theorem_a_4_by_enumeration(false_positive: float) -> None:
    """A drafted token stays if it is acceptable, if the verifier lets it pass, or if the target's
    test does (Eq. 35)."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        p, q = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
        stays = sum(
            q[x] * (1.0 if q[x] <= p[x] else false_positive + (1 - false_positive) * p[x] / q[x])
            for x in range(5)
        )
        assert formulas.sprinter_acceptance(
            false_positive, 0.5 * np.abs(p - q).sum()
        ) == pytest.approx(stays)


def test_equations_5_and_6_differ_by_the_targets_tokens() -> None:
    assert formulas.sd_flops(7, 1.0, 10.0) - formulas.sprinter_flops(7, 1.0, 10.0) == pytest.approx(
        6 * 10.0
    )


def test_flops_of_the_papers_models_are_those_of_its_table() -> None:
    """Figure 10, to a unit of the last digit that it prints; and what the page says of Figure 1."""
    ours = {
        "GPT-Neo-125M": (8.01, formulas.forward_flops(12, 768, 12, 50257, 2048)),
        "GPT-Neo-1.3B": (64.66, formulas.forward_flops(24, 2048, 16, 50257, 2048)),
        "GPT2-Small": (7.25, formulas.forward_flops(12, 768, 12, 50257, 1024)),
        "GPT2-XL": (71.78, formulas.forward_flops(48, 1600, 25, 50257, 1024)),
    }
    for theirs, flops in ours.values():
        assert 20 * flops / 1e9 == pytest.approx(theirs, abs=0.01)
    saved = [
        formulas.sd_flops(20, ours[draft][1], ours[target][1])
        / formulas.sprinter_flops(20, ours[draft][1], ours[target][1])
        for draft, target in (("GPT-Neo-125M", "GPT-Neo-1.3B"), ("GPT2-Small", "GPT2-XL"))
    ]
    said = " ".join(papers_named("sprinter")[0].elsewhere)
    assert "is {:.1f} times for GPT-Neo ({:.1f} for GPT-2)".format(*saved) in said


def test_runs_that_nothing_cuts_short_are_longer_than_sds() -> None:
    """Against sums: a run of any length over one of at most γ tokens."""
    alpha, gamma = 0.8, 5
    endless = sum(alpha**i for i in range(1, 500))
    assert formulas.run_lengths(alpha, gamma) == pytest.approx(
        endless / sum(alpha**i for i in range(1, gamma + 1))
    )
