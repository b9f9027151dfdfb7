"""Speed-ups by formula: known values, a simulation of the rounds, and how they must move."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from draftwell.components.formulas import (
    expected_tokens,
    overlapped_seconds,
    serial_length,
)
from draftwell.components.regimes.lines import break_even_alphas, break_even_costs
from draftwell.components.regimes.speedups import (
    FLAT,
    METHODS,
    Pair,
    Placement,
    Qualifier,
    Verifier,
    csd,
    fastest,
    overlapped,
    pearl,
    pyramid_sd,
    sd,
    spide,
    sprinter,
)
from draftwell.serving.artifacts.forward_costs import seconds_at

TURN, OWN = Placement.IN_TURN, Placement.OWN
CURVE = {1: 1.0, 4: 1.1, 8: 1.2, 16: 2.1, 32: 3.6}
"""A processor's: longer verifications take longer."""


@pytest.mark.parametrize(("alpha", "gain"), [(0.5, 1.05), (0.8, 1.18), (0.9, 1.24), (0.95, 1.25)])
def test_spide_over_sd_without_contention(alpha: float, gain: float) -> None:
    pair = Pair(0.145, alpha)
    assert spide(pair, OWN) / sd(pair) == pytest.approx(gain, abs=0.005)
    assert fastest(pair, TURN) == "SD"


@pytest.mark.parametrize(
    ("alpha", "c"), [(0.52, 0.15), (0.63, 0.12), (0.7, 0.1), (0.8, 0.07), (0.9, 0.04)]
)
def test_duo_decoding_breaks_even_with_sd(alpha: float, c: float) -> None:
    """Digits behind the second are cut in these figures."""
    (even,) = break_even_costs("DuoDecoding", "SD", alpha, OWN, [i / 200 for i in range(3, 60)])
    assert c <= even < c + 0.0125


def simulated(pair: Pair, serial: int, steps: int, placement: Placement, rounds: int) -> float:
    """Tokens by time of SPIDE's and PEARL's rounds, token by token; a `serial` of −1: SD's, with
    drafts of `steps`."""
    coin, tokens, seconds, pending = random.Random(7), 0, 0.0, -1
    for _ in range(rounds):
        overlapping = serial >= 0
        if pending < 0:  # after a rejection
            pending = serial if overlapping else steps
            seconds += pending * pair.c
        verifying = seconds_at(pair.verify, pending + 1)
        drafting = steps * pair.c if overlapping else 0.0
        seconds += max(verifying, drafting) if placement is OWN else verifying + drafting
        judged = pending + overlapping
        kept = next((i for i in range(judged) if coin.random() >= pair.alpha), judged)
        tokens += kept + (kept < judged or not overlapping)  # the correction, or SD's bonus
        pending = steps - 1 if overlapping and kept == judged else -1
    return tokens / seconds


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("verify", [FLAT, CURVE])
@pytest.mark.parametrize(("serial", "steps"), [(0, 5), (3, 5), (6, 1), (-1, 4)])
def test_a_simulation_of_the_rounds_agrees(
    placement: Placement, verify: dict[int, float], serial: int, steps: int
) -> None:
    pair = Pair(0.21, 0.8, verify)
    found = simulated(pair, serial, steps, placement, 20_000)
    if serial >= 0:
        expected = float(overlapped(pair, serial, steps, placement))
    else:
        expected = expected_tokens(0.8, steps) / (steps * pair.c + seconds_at(verify, steps + 1))
        assert sd(pair) >= expected
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_a_long_text_by_the_papers_algorithm_agrees(alpha: float) -> None:
    """SPIDE's own formula counts a text's beginning and end, too."""
    passes = 1.0, {1: 7.0}
    serial = serial_length(alpha, 0.7)
    text = 7.0 * 4000 / overlapped_seconds(4000, alpha, passes, lambda _: 7, serial=serial)
    assert text == pytest.approx(float(overlapped(Pair(1 / 7, alpha), serial, 7, OWN)), rel=0.005)


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("name", METHODS)
def test_more_acceptance_helps_and_more_cost_does_not(name: str, placement: Placement) -> None:
    method = METHODS[name]
    for verify in (FLAT, CURVE):
        by_alpha = [method(Pair(0.13, i / 20, verify), placement) for i in range(1, 20)]
        by_cost = [method(Pair(i / 40, 0.8, verify), placement) for i in range(1, 30)]
        assert all(first <= then + 1e-9 for first, then in pairwise(by_alpha))
        assert all(first >= then - 1e-9 for first, then in pairwise(by_cost))
    pair = Pair(0.13, 0.8)
    assert method(pair, OWN) >= method(pair, TURN)
    assert method(pair._replace(verify=CURVE), placement) <= method(pair, placement)


def test_a_continuation_is_bounded_by_what_one_pass_verifies() -> None:
    """Without the bound the best of more than eight steps would count."""
    pair = Pair(0.02, 0.97, CURVE)
    assert pearl(pair, OWN) == float(overlapped(pair, 0, 8, OWN))
    assert float(overlapped(pair, 0, 12, OWN)) != pearl(pair, OWN)


@pytest.mark.parametrize(
    ("name", "base", "placement"),
    [("SD", "plain decoding", TURN), ("DuoDecoding", "SD", OWN), ("SPRINTER", "SD", TURN)],
)
@pytest.mark.parametrize("c", [0.05, 0.12])
def test_speeds_are_equal_on_a_break_even_line(
    name: str, base: str, placement: Placement, c: float
) -> None:
    found = break_even_alphas(name, base, c, placement)
    assert found

    def speeds(alpha: float) -> tuple[float, float]:
        return METHODS[name](Pair(c, alpha), placement), METHODS[base](Pair(c, alpha), placement)

    for alpha in found:
        mine, other = speeds(alpha)
        assert mine == pytest.approx(other, rel=1e-6)
        (low, low_base), (high, high_base) = speeds(alpha - 0.01), speeds(alpha + 0.01)
        assert (low > low_base) != (high > high_base)


def test_with_a_flat_verification_sd_needs_an_acceptance_of_c() -> None:
    assert break_even_alphas("SD", "plain decoding", 0.3, TURN) == [pytest.approx(0.3)]
    dearer = break_even_alphas("SD", "plain decoding", 0.3, TURN, {1: 1.0, 2: 1.2})
    assert dearer == [pytest.approx(0.5)]


@pytest.mark.parametrize("verifier", [Verifier(0.9, 0.3), Verifier(0.6, 0.0)])
def test_sprinter_is_theorem_33_over_runs_of_every_length(verifier: Verifier) -> None:
    pair, (t, f) = Pair(0.1, 0.7), verifier

    def accepted(r: int) -> float:
        return sum(t**i for i in range(r)) - 1 + t**r / (1 - f)

    run = sum(0.7**r * 0.3 * accepted(r) for r in range(200)) + 1
    assert sprinter(pair, verifier=verifier) == pytest.approx(run / (run * 0.1 + 1))


def test_csd_is_sd_with_what_it_rescues() -> None:
    pair = Pair(0.1, 0.6)
    assert csd(pair, share=0.0) == sd(pair)
    assert csd(pair, share=0.5) == sd(Pair(0.1, 0.8))


def test_a_qualifier_that_is_the_draft_adds_nothing_but_its_passes() -> None:
    """A qualifier without cost that keeps nothing writes a token each time by itself."""
    assert pyramid_sd(Pair(0.0, 0.5), Qualifier(0.1, 0.0, 0.8)) == pytest.approx(sd(Pair(0.1, 0.8)))
    better = [pyramid_sd(Pair(0.05, 0.5), Qualifier(0.3, 0.8, kept)) for kept in (0.7, 0.8, 0.9)]
    assert better == sorted(better)
