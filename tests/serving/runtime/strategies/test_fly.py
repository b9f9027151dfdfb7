"""FLy: its equations over tables, and its law by enumeration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from draftwell.serving.runtime.acceptance.deferred import Deferred, measured_entropy
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.types import Draft
from tests.support.errors import raises_code
from tests.support.models.counters import counters
from tests.support.models.enumeration import Oracle, distance, law_of, run_once, true_law
from tests.support.models.resources import decode
from tests.support.models.spans import decided, span_of
from tests.support.published.decoding import greedy
from tests.support.published.fly import fly
from tests.support.published.pairs import PROMPT, Seen, pairs, rounds_seen, tables


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The rounds of our strategy, as long as somebody clears the list between requests."""
    return rounds_seen(monkeypatch)


@pytest.mark.parametrize(
    ("entropy", "theta", "window"),
    [("normalised", 0.3, 1), ("normalised", 0.6, 2), ("top3", 0.9, 1), ("normalised", 0.0, 0)],
)
def test_greedy_fly_is_the_papers_equations(rounds, entropy, theta, window):
    kept = rejected = 0
    for pair in pairs():
        rounds.clear()
        settings = {
            "num_speculative_tokens": 6,
            "entropy": entropy,
            "threshold": theta,
            "window": window,
        }
        job = decode(pair.models, PROMPT, "fly", settings, max_tokens=60)
        first = pair.target.best(PROMPT)
        paper, stayed = fly(
            pair.target,
            pair.draft,
            greedy(),
            [*PROMPT, first],
            59,
            6,
            theta,
            window,
            top3=entropy == "top3",
        )
        assert job.output == [first, *paper.text]
        assert rounds == paper.rounds
        assert job.session.stats.rescued == stayed
        kept += stayed
        rejected += sum(one.judged > one.accepted for one in rounds)
    assert kept > 0
    assert rejected > 0 or theta == 0


@pytest.mark.parametrize(("theta", "window"), [(0.6, 1), (0.0, 0)])
def test_sampled_fly_has_the_law_of_the_equations(rounds, theta, window):
    pair, sampling = tables(3, vocab=3, temperature=1.0), Sampling(max_tokens=4, temperature=1.0)
    settings = {"num_speculative_tokens": 2, "threshold": theta, "window": window}

    def ours(oracle: Oracle) -> Any:
        rounds.clear()
        job = run_once(build_strategy("fly", settings), pair.models, PROMPT, sampling, oracle)
        return tuple(job.output), tuple(rounds)

    def paper(oracle: Oracle) -> Any:
        first = oracle.draw(pair.target.probs(PROMPT))
        decoded, _ = fly(pair.target, pair.draft, oracle, [*PROMPT, first], 3, 2, theta, window)
        return (first, *decoded.text), tuple(decoded.rounds)

    law = law_of(paper)
    assert distance(law_of(ours), law) < 1e-6
    texts: dict[Any, float] = {}
    for (text, _), mass in law.items():
        texts[text] = texts.get(text, 0.0) + mass
    assert distance(texts, true_law(pair.models["target"], PROMPT, sampling)) > 1e-3


# The target is undecided at every place and prefers token 0, so that each 1 is a mismatch
UNDECIDED = [1.0, 0.9, 0.8]


def verdict_on(tokens: list[int], window: int, *, threshold: float = 0.5, **sampling: Any) -> Any:
    rows = span_of(torch.tensor([UNDECIDED] * (len(tokens) + 1)), Sampling(**sampling))
    rule = Deferred("normalised", threshold, window, frozenset({2}))
    return decided(rule.judge(Draft(tokens), rows, Streams(0)))


@pytest.mark.parametrize(
    ("tokens", "window", "accepted", "rescued_at"),
    [
        ([1, 0, 0, 0], 2, 4, [0]),
        ([1, 0, 1, 0], 2, 0, []),  # the target corrects within the window
        ([1, 0, 0, 1], 2, 3, [0]),  # behind it: judged anew, and no window fits there
        ([0, 1, 0], 2, 1, []),  # the window does not fit into the draft
        ([1, 0, 0, 1, 0, 0], 2, 6, [0, 3]),
        ([1, 1], 0, 2, [0, 1]),
        ([2, 0, 0], 2, 0, []),  # a special token
    ],
)
def test_the_window(tokens, window, accepted, rescued_at):
    found = verdict_on(tokens, window)
    assert (found.accepted, list(found.rescued_at)) == (accepted, rescued_at)
    assert found.token == 0


def test_the_gate():
    assert verdict_on([1, 0, 0], 2, threshold=0.99).accepted == 3
    assert verdict_on([1, 0, 0], 2, threshold=1.0).accepted == 0, "h is just below 1"
    row = span_of(torch.tensor([[0.0, 0.0, 0.0, 0.0, -50.0]]), Sampling())
    assert measured_entropy("normalised", row, 0) == pytest.approx(math.log(4) / math.log(5))
    assert measured_entropy("top3", row, 0) == pytest.approx(0.75 * math.log(4)), (
        "three of four likely tokens, not renormalised"
    )
    assert measured_entropy("top3", span_of(torch.tensor([[0.0, -200.0]]), Sampling()), 0) == 0


@pytest.mark.parametrize("altered", [{"logit_bias": {1: -5.0}}, {"stop_token_ids": {1}}], ids=str)
def test_what_a_request_rules_out_does_not_stay(altered):
    altered = {name: frozenset(v) if isinstance(v, set) else v for name, v in altered.items()}
    assert verdict_on([1, 0, 0], 2, **altered).accepted == 0
    cut = verdict_on([1, 0, 0], 2, temperature=1.0, top_k=1)
    assert (cut.accepted, cut.token) == (0, 0)


def test_a_window_that_never_fits_is_vanilla_speculative_decoding_or_refused():
    with raises_code("bad_parameter", "window 6", "num_speculative_tokens 6"):
        build_strategy("fly", {"num_speculative_tokens": 6})
    for temperature in (0.0, 1.0):
        pair = pairs()[0]
        settings: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 4}
        never = {"num_speculative_tokens": 4, "window": 3, "threshold": 1.5}
        mine = decode(pair.models, PROMPT, "fly", never, **settings)
        vanilla = decode(
            pair.models, PROMPT, "vanilla_sd", {"num_speculative_tokens": 4}, **settings
        )
        assert mine.output == vanilla.output
        assert counters(mine.session.stats) == counters(vanilla.session.stats)
