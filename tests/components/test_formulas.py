"""The papers' formulas against enumeration and simulation."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from draftwell.components import formulas
from draftwell.components.papers.tables import papers_named
from draftwell.serving.artifacts.forward_costs import in_one_pass

FLAT = {1: 1.0, 64: 1.0}


def leviathan(alpha: float, gamma: int, c: float) -> float:
    """Theorem 3.8 as it is printed."""
    return (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))


def spide_seconds(tokens: int, alpha: float, tau: float, passes: formulas.Passes) -> float:
    """With a continuation as the strategy drafts it: what fits into a verification, and no more
    than the target verifies in about one pass."""
    draft, verify = passes
    bound = in_one_pass(verify, 32)
    return formulas.overlapped_seconds(
        tokens,
        alpha,
        passes,
        lambda pending: min(bound, max(1, int(formulas.seconds_at(verify, pending + 1) / draft))),
        serial=formulas.serial_length(alpha, tau),
    )


def test_passes_that_cost_what_leviathan_assumes_give_his_formula() -> None:
    for alpha, gamma, c in ((0.5, 2, 0.05), (0.9, 8, 0.2)):
        assert formulas.sd_speedup(alpha, gamma, 1.0, c, FLAT) == pytest.approx(
            leviathan(alpha, gamma, c)
        )


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


def test_the_best_gamma_grows_with_acceptance() -> None:
    found = [formulas.best_gamma(alpha, 0.05, FLAT) for alpha in (0.2, 0.5, 0.8, 0.95)]
    assert found == sorted(found)
    assert found[0] < 3 < found[-1]
    speeds = [leviathan(0.8, gamma, 0.05) for gamma in range(1, 33)]
    assert found[2] == 1 + speeds.index(max(speeds))


@pytest.mark.parametrize("tokens", [1, 2, 20, 63])
@pytest.mark.parametrize(
    ("alpha", "tau", "draft"),
    [(0.5, 0.7, 0.06), (0.8, 0.7, 0.06), (0.95, 0.5, 0.25), (0.8, 0.9, 0.5), (0.6, 0.7, 0.01)],
)
def test_spides_seconds_by_simulation(alpha: float, tau: float, draft: float, tokens: int) -> None:
    """Algorithm 1, token by token: what is left of a window after x_{k+1} was tested is tested next
    time, and nothing twice. Eight tokens are verified in 1.25 times the time of one: no
    continuation is longer."""
    passes = draft, {1: 1.2, 8: 1.5, 32: 2.6}
    rng, runs = random.Random(7), 4_000
    seconds = 0.0
    for _ in range(runs):
        left = tokens
        while left > 0:
            pending, chance = 0, 1.0
            while pending < min(32, left - 1):
                pending, chance = pending + 1, chance * alpha
                seconds += draft
                if chance <= tau + 1e-12:
                    break
            while True:
                took = formulas.seconds_at(passes[1], pending + 1)
                steps = min(8, max(1, int(took / draft)), left - pending)
                judged = pending + (steps > 0)
                seconds += max(took, steps * draft)
                kept = next((i for i in range(judged) if rng.random() >= alpha), judged)
                left -= kept + (kept < judged or not steps)
                if kept < judged or not steps or left <= 0:
                    break
                pending = steps - 1
    assert spide_seconds(tokens, alpha, tau, passes) == pytest.approx(seconds / runs, rel=0.02)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_sds_seconds_by_simulation(tokens: int) -> None:
    """No draft goes beyond the text, and its last token is the target's."""
    rng, runs, seconds = random.Random(5), 4_000, 0.0
    alpha, gamma, draft = 0.7, 5, 0.1
    for _ in range(runs):
        left = tokens
        while left > 0:
            drafted = min(gamma, left - 1)
            seconds += drafted * draft + 1 + 0.1 * drafted
            left -= 1 + next((i for i in range(drafted) if rng.random() >= alpha), drafted)
    verify = {1: 1.0, 11: 2.0}
    assert formulas.sd_seconds(tokens, alpha, gamma, (draft, verify)) == pytest.approx(
        seconds / runs, rel=0.02
    )


def test_long_texts_come_to_leviathans_formula() -> None:
    """Whose rounds have no end to keep away from."""
    alpha, gamma, draft = 0.8, 4, 0.2
    plain, long = 2_000 * 1.0, formulas.sd_seconds(2_000, alpha, gamma, (draft, FLAT))
    assert plain / long == pytest.approx(leviathan(alpha, gamma, draft), rel=0.005)


def test_spide_gains_nothing_where_nothing_is_kept_and_more_the_more_is_kept() -> None:
    """With α = 0 each cycle is one draft and one verification, as SD's with γ = 1."""
    times = 0.06, FLAT
    assert spide_seconds(200, 0.0, 0.7, times) == pytest.approx(
        formulas.sd_seconds(200, 0.0, 1, times), rel=0.01
    )
    best = {alpha: formulas.best_gamma(alpha, *times) for alpha in (0.5, 0.8, 0.9)}
    gains = [
        formulas.sd_seconds(500, alpha, gamma, times) / spide_seconds(500, alpha, 0.7, times)
        for alpha, gamma in best.items()
    ]
    assert gains == sorted(gains)
    assert gains[-1] > 1.1


def forward_flops(layers: int, hidden: int, heads: int, vocab: int, context: int) -> float:
    """Of a pass over one token of a GPT-2-like model (Hoffmann 2022, Appendix F; SPRINTER, A.8):
    embeddings count as a product, and every token attends over a full context."""
    products = 24 * hidden**2  # queries, keys and values 6, output 2, feed-forward 16
    attention = 4 * context * hidden + 3 * heads * context
    return float(4 * vocab * hidden + layers * (products + attention))


def test_flops_of_the_papers_models_are_those_of_its_table() -> None:
    """Figure 10, to a unit of the last digit that it prints; and what the page says of Figure 1."""
    ours = {
        "GPT-Neo-125M": (8.01, forward_flops(12, 768, 12, 50257, 2048)),
        "GPT-Neo-1.3B": (64.66, forward_flops(24, 2048, 16, 50257, 2048)),
        "GPT2-Small": (7.25, forward_flops(12, 768, 12, 50257, 1024)),
        "GPT2-XL": (71.78, forward_flops(48, 1600, 25, 50257, 1024)),
    }
    for theirs, flops in ours.values():
        assert 20 * flops / 1e9 == pytest.approx(theirs, abs=0.01)
    saved = [  # Eq. 5 over Eq. 6, the verifier costing nothing
        20 * (ours[draft][1] + ours[target][1]) / (20 * ours[draft][1] + ours[target][1])
        for draft, target in (("GPT-Neo-125M", "GPT-Neo-1.3B"), ("GPT2-Small", "GPT2-XL"))
    ]
    said = " ".join(papers_named("sprinter")[0].elsewhere)
    assert "is {:.1f} times for GPT-Neo ({:.1f} for GPT-2)".format(*saved) in said
