"""Our strategies against the published loops (`tests/support/published`): the same tokens and
rounds, or the difference and its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.enumeration import Oracle, distance, law_of, run_once, true_law
from tests.support.models.resources import ORIGIN, counting_pair, decode, table_resources
from tests.support.published.decoding import Decoded, Reader, Round, greedy
from tests.support.published.duo_decoding import draft_sequences, duo_decoding
from tests.support.published.pairs import (
    PROMPT,
    Pair,
    Seen,
    kinds_of,
    llamas,
    pairs,
    rounds_seen,
    tables,
    unsure_pairs,
)
from tests.support.published.pearl import pearl
from tests.support.published.speculative_sampling import speculative_sampling
from tests.support.published.sprinter import sprinter
from tests.support.published.within_budget import cut_pearl, cut_sd, cut_sprinter


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The rounds of our strategy, as long as somebody clears the list between requests."""
    return rounds_seen(monkeypatch)


def verifier(width: int, bias: float = 0.5, seed: int = 7) -> Verifier:
    return Verifier(
        torch.randn(width, generator=torch.Generator().manual_seed(seed)),
        bias,
        ("before",),
        0.5,
        1.2,
        ORIGIN,
    )


def score_of(learned: Verifier) -> Callable[[torch.Tensor], float]:
    return lambda state: float(torch.sigmoid(state @ learned.weight + learned.bias))


def run(
    pair: Pair,
    name: str,
    parameters: dict,
    rounds: Seen,
    *,
    learned: Verifier | None = None,
    **sampling: Any,
):
    rounds.clear()
    resources = table_resources() if learned is None else table_resources(verifier=learned)
    return decode(pair.models, PROMPT, name, parameters, resources, **sampling)


# Greedy: tokens, and rounds one by one


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_greedy_sd_is_the_published_loop_behind_a_first_token_of_the_target(rounds, gamma):
    """Ours samples the first token from the prompt's forward pass; the published loop would draft
    before it."""
    happened: set[str] = set()
    for pair in [*pairs(), llamas()] if gamma == 3 else pairs():
        job = run(pair, "vanilla_sd", {"num_speculative_tokens": gamma}, rounds, max_tokens=40)
        first = pair.target.best(PROMPT)
        published = speculative_sampling(
            pair.target, pair.draft, greedy(), [*PROMPT, first], 39, gamma
        )
        assert job.output == [first, *published.text][:40]
        assert rounds == cut_sd(published, 39, gamma)
        stats = job.session.stats
        assert (stats.target_calls, stats.prefill_calls) == (len(published.rounds), 1)
        happened |= kinds_of(rounds)
    assert happened >= ({"all", "some", "none"} if gamma > 1 else {"all", "none"})


@pytest.mark.parametrize("gamma", [1, 3])
def test_greedy_sd_that_drafts_first_is_the_published_loop_from_the_prompt_on(rounds, gamma):
    """One call less than behind a first token, and the prompt's pass judges a draft."""
    happened: set[str] = set()
    for pair in [*pairs(), llamas()] if gamma == 3 else pairs():
        job = run(
            pair,
            "vanilla_sd",
            {"num_speculative_tokens": gamma, "draft_first": True},
            rounds,
            max_tokens=40,
        )
        published = speculative_sampling(pair.target, pair.draft, greedy(), PROMPT, 40, gamma)
        assert job.output == published.text[:40]
        assert rounds == cut_sd(published, 40, gamma)
        assert job.session.stats.target_calls == len(published.rounds)
        happened |= kinds_of(rounds[:1])
    assert happened >= {"all", "none"}, "first rounds that end with a kept and with a lost draft"


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_greedy_pearl_is_the_published_loop(rounds, gamma):
    happened: set[str] = set()
    for pair in [*pairs(), llamas()] if gamma == 2 else pairs():
        job = run(pair, "pearl", {"num_speculative_tokens": gamma}, rounds, max_tokens=40)
        published = pearl(pair.target, pair.draft, greedy(), PROMPT, 40 + gamma - 1, gamma)
        assert job.output == published.text[:40]
        assert rounds == cut_pearl(published, 40, gamma)
        assert job.session.stats.target_calls == len(rounds)
        happened |= kinds_of(rounds)
    assert happened >= ({"all", "some", "none"} if gamma > 1 else {"all", "none"})


def whole_rounds(published: Decoded, tokens: int) -> int:
    """How many rounds begin before there are `tokens`."""
    return next(
        i
        for i in range(len(published.rounds))
        if sum(one.accepted + 1 for one in published.rounds[:i]) >= tokens
    )


@pytest.mark.parametrize("gamma", [12, 16, 24])
def test_greedy_duo_decoding_is_the_published_loop_where_that_has_several_sequences(rounds, gamma):
    """Its gammas of dynamic drafting. Rounds are compared as far as no budget shortens a draft."""
    numbers, ranks = set(), 0
    for pair in [*unsure_pairs(), llamas()] if gamma == 12 else unsure_pairs():
        job = run(
            pair,
            "duo_decoding",
            {"num_speculative_tokens": gamma},
            rounds,
            max_tokens=16 + 2 * gamma,
        )
        published = duo_decoding(pair.target, pair.draft, PROMPT, 16 + 3 * gamma, gamma)
        assert job.output == published.text[: 16 + 2 * gamma]
        whole = whole_rounds(published, 16)
        assert rounds[:whole] == published.rounds[:whole]
        assert whole >= 2
        for end in range(0, 16, 3):
            numbers.add(len(draft_sequences(pair.draft, PROMPT + job.output[:end], gamma)))
        ranks += sum(one.judged > one.accepted > 0 for one in rounds[:whole])
    assert len(numbers) > 2
    assert ranks > 0


@pytest.mark.parametrize("cap", [1, 4, 20])
def test_greedy_sprinter_is_the_published_loop_behind_a_first_token_of_the_target(rounds, cap):
    """The published code keeps a flagged token that the target confirms and draws a bonus behind
    it, as ours does; its cap is 20."""
    calls = kept = 0
    for pair in [*pairs(), llamas()] if cap == 4 else pairs():
        learned = verifier(len(pair.draft.read(PROMPT)[1]), bias=1.0)
        job = run(
            pair, "sprinter", {"tau": 0.5, "max_run": cap}, rounds, learned=learned, max_tokens=60
        )
        first = pair.target.best(PROMPT)
        published = sprinter(
            pair.target, pair.draft, score_of(learned), greedy(), [*PROMPT, first], 59, cap=cap
        )
        assert job.output == [first, *published.text][:60]
        assert rounds == cut_sprinter(published, 59, cap)
        calls += job.session.stats.target_calls
        kept += sum(one.accepted == one.drafted for one in rounds)
    assert 0 < kept < calls


# Sampled: the joint distribution of text and rounds


def law_of_ours(
    rounds: Seen,
    pair: Pair,
    name: str,
    parameters: dict,
    sampling: Sampling,
    learned: Verifier | None = None,
):
    resources = table_resources() if learned is None else table_resources(verifier=learned)

    def one(oracle: Oracle):
        rounds.clear()
        job = run_once(
            build_strategy(name, parameters, resources), pair.models, PROMPT, sampling, oracle
        )
        return tuple(job.output), tuple(rounds)

    return law_of(one)


def texts(law: dict) -> dict:
    """The law of the texts alone."""
    total: dict = {}
    for (text, _), mass in law.items():
        total[text] = total.get(text, 0.0) + mass
    return total


@pytest.mark.parametrize("gamma", [1, 2])
def test_sampled_sd_has_the_published_loops_law_of_texts_and_rounds(rounds, gamma):
    pair, sampling = tables(3, vocab=2, temperature=0.7), Sampling(max_tokens=4, temperature=0.7)

    def published(oracle: Oracle):
        first = oracle.draw(pair.target.probs(PROMPT))
        decoded = speculative_sampling(pair.target, pair.draft, oracle, [*PROMPT, first], 3, gamma)
        return tuple([first, *decoded.text][:4]), tuple(cut_sd(decoded, 3, gamma))

    law = law_of(published)
    assert (
        distance(
            law_of_ours(rounds, pair, "vanilla_sd", {"num_speculative_tokens": gamma}, sampling),
            law,
        )
        < 1e-6
    )
    assert distance(texts(law), true_law(pair.models["target"], PROMPT, sampling)) < 1e-6


def pearl_law(pair: Pair, budget: int, gamma: int, **settings: Any) -> dict:
    def published(oracle: Oracle):
        decoded = pearl(
            pair.target, pair.draft, oracle, PROMPT, budget + gamma - 1, gamma, **settings
        )
        return tuple(decoded.text[:budget]), tuple(cut_pearl(decoded, budget, gamma))

    return law_of(published)


@pytest.mark.parametrize("gamma", [1, 2])
def test_sampled_pearl_has_the_published_loops_law_of_texts_and_rounds(rounds, gamma):
    pair, sampling = tables(3, vocab=2, temperature=1.0), Sampling(max_tokens=3, temperature=1.0)
    ours = law_of_ours(rounds, pair, "pearl", {"num_speculative_tokens": gamma}, sampling)
    assert distance(ours, pearl_law(pair, 3, gamma)) < 1e-6


def sprinter_law(
    pair: Pair,
    learned: Verifier,
    budget: int,
    cap: int,
    wrap: Callable = lambda oracle: oracle,
    **settings: Any,
) -> dict:
    def published(oracle: Oracle):
        first = oracle.draw(pair.target.probs(PROMPT))
        decoded = sprinter(
            pair.target,
            pair.draft,
            score_of(learned),
            wrap(oracle),
            [*PROMPT, first],
            budget - 1,
            cap=cap,
            **settings,
        )
        return tuple([first, *decoded.text][:budget]), tuple(cut_sprinter(decoded, budget - 1, cap))

    return law_of(published)


def test_sampled_sprinter_has_the_published_loops_law_of_texts_and_rounds(rounds):
    """A lossy law: not the target's."""
    pair, sampling, learned = (
        tables(5, vocab=3, temperature=1.0),
        Sampling(max_tokens=4, temperature=1.0),
        verifier(3, seed=2),
    )
    law = sprinter_law(pair, learned, 4, 3)
    assert (
        distance(
            law_of_ours(rounds, pair, "sprinter", {"tau": 0.5, "max_run": 3}, sampling, learned),
            law,
        )
        < 1e-6
    )
    assert distance(texts(law), true_law(pair.models["target"], PROMPT, sampling)) > 0.01
    assert len({made for _, made in law}) > 3


# Where they differ


def test_the_published_sd_overshoots_its_budget_and_knows_no_stop_token(rounds):
    """Ours ends drafts with the budget and at stop tokens, and so drafts less at the end; up to
    there it is the same."""
    stopped = overshot = 0
    for pair in pairs():
        first = pair.target.best(PROMPT)
        published = speculative_sampling(pair.target, pair.draft, greedy(), [*PROMPT, first], 12, 5)
        overshot += len(published.text) > 12
        text = [first, *published.text][:13]
        for stop in range(8):
            job = run(
                pair,
                "vanilla_sd",
                {"num_speculative_tokens": 5},
                rounds,
                max_tokens=13,
                stop_token_ids=frozenset({stop}),
            )
            assert job.output == (text[: text.index(stop) + 1] if stop in text else text)
            last = rounds[-1] if rounds else Round(0, 0, 0)
            if stop in text and last.accepted == last.judged > 0:
                assert last.drafted == last.accepted, "nothing is drafted after a stop token"
                stopped += 1
    assert stopped > 0
    assert overshot > 0


def test_the_published_pearl_returns_tokens_that_nobody_verified(rounds):
    """A draft joins its text once x_1 is kept, and the loop ends by that length: up to gamma − 1
    tokens at the end are the draft's.

    Ours verifies them first, with one more call of the target.
    """
    wrong = 0
    for pair in pairs():
        published = pearl(pair.target, pair.draft, greedy(), PROMPT, 12, 4)
        verified = len(published.text) - published.unverified
        job = run(
            pair, "pearl", {"num_speculative_tokens": 4}, rounds, max_tokens=len(published.text)
        )
        plain = run(pair, "autoregressive", {}, [], max_tokens=len(published.text))
        assert job.output == plain.output
        assert job.output[:verified] == published.text[:verified]
        if job.output != published.text:
            wrong += 1
            assert job.session.stats.target_calls > len(published.rounds)
    assert wrong > 0


def test_the_published_pearl_seeds_two_tests_alike_and_is_not_lossless_for_that(rounds):
    """It seeds its generator by the text's length: x_1 in pre-verify and x_2 in post-verify are
    tested with one uniform.

    Ours draws one uniform for each test (docs/methods.md, condition 1), which is its loop with
    independent tests.
    """
    pair, sampling = tables(5, vocab=2, temperature=1.0), Sampling(max_tokens=3, temperature=1.0)
    truth = true_law(pair.models["target"], PROMPT, sampling)
    assert distance(texts(pearl_law(pair, 3, 2)), truth) < 1e-6
    assert distance(texts(pearl_law(pair, 3, 2, seeds_by_place=True)), truth) > 2e-3
    assert (
        distance(
            texts(law_of_ours(rounds, pair, "pearl", {"num_speculative_tokens": 2}, sampling)),
            truth,
        )
        < 1e-6
    )


def test_the_published_duo_decoding_has_one_sequence_at_other_budgets(rounds):
    """Ours rounds the number down to any budget's divisor; with `max_sequences` 1 it is the
    published loop there, too."""
    for pair in unsure_pairs():
        published = duo_decoding(pair.target, pair.draft, PROMPT, 36, 6)
        assert len(draft_sequences(pair.draft, PROMPT, 6)) == 1
        job = run(
            pair,
            "duo_decoding",
            {"num_speculative_tokens": 6, "max_sequences": 1},
            rounds,
            max_tokens=36,
        )
        same = whole_rounds(published, 24)
        assert rounds[:same] == published.rounds[:same]
        several = run(pair, "duo_decoding", {"num_speculative_tokens": 6}, rounds, max_tokens=36)
        assert several.output == job.output
        assert rounds[:same] != published.rounds[:same]


def test_the_published_duo_decoding_returns_tokens_that_nobody_verified(rounds):
    wrong = 0
    for pair in unsure_pairs():
        published = duo_decoding(pair.target, pair.draft, PROMPT, 30, 12)
        verified = len(published.text) - published.unverified
        job = run(
            pair,
            "duo_decoding",
            {"num_speculative_tokens": 12},
            rounds,
            max_tokens=len(published.text),
        )
        assert (
            job.output == run(pair, "autoregressive", {}, [], max_tokens=len(published.text)).output
        )
        assert job.output[:verified] == published.text[:verified]
        wrong += job.output != published.text
    assert wrong > 0


def test_algorithm_2_of_sprinter_to_the_letter_drops_the_flagged_token(rounds):
    """Ours, as SPRINTER's code: a confirmed token stays and brings a bonus. To the letter it makes
    way for one drawn from p.

    Greedy and all flagged, that is the same text with one call a token. Sampled, p would be drawn
    from where the residual alone is exact.
    """
    pair, flags = tables(1), verifier(8, bias=-1e4)
    job = run(pair, "sprinter", {"tau": 0.5}, rounds, learned=flags, max_tokens=30)
    first = pair.target.best(PROMPT)
    literal = sprinter(
        pair.target, pair.draft, score_of(flags), greedy(), [*PROMPT, first], 29, drops_flagged=True
    )
    assert job.output == [first, *literal.text]
    assert len(literal.rounds) == 29 > job.session.stats.target_calls

    pair, flags, sampling = (
        tables(5, vocab=3, temperature=1.0),
        verifier(3, bias=-1e4),
        Sampling(max_tokens=3, temperature=1.0),
    )
    truth = true_law(pair.models["target"], PROMPT, sampling)
    assert (
        distance(texts(law_of_ours(rounds, pair, "sprinter", {"tau": 0.5}, sampling, flags)), truth)
        < 1e-6
    )
    assert distance(texts(sprinter_law(pair, flags, 3, 20)), truth) < 1e-6
    assert distance(texts(sprinter_law(pair, flags, 3, 20, drops_flagged=True)), truth) > 1e-2


class RedrawsZero:
    """SPRINTER's `sample`, which draws once more where it drew token 0."""

    def __init__(self, oracle: Oracle):
        self.oracle, self.accepts = oracle, oracle.accepts

    def draw(self, probs: torch.Tensor) -> int:
        return self.oracle.draw(probs) or self.oracle.draw(probs)


def test_the_published_sprinter_avoids_token_0(rounds):
    """Its helper redraws it, so that q is not what was sampled from; ours draws once. Seen with a
    verifier that flags everything."""
    pair, flags, sampling = (
        tables(5, vocab=3, temperature=1.0),
        verifier(3, bias=-1e4),
        Sampling(max_tokens=3, temperature=1.0),
    )
    truth = true_law(pair.models["target"], PROMPT, sampling)
    assert distance(texts(sprinter_law(pair, flags, 3, 20, wrap=RedrawsZero)), truth) > 1e-2
    assert (
        distance(texts(law_of_ours(rounds, pair, "sprinter", {"tau": 0.5}, sampling, flags)), truth)
        < 1e-6
    )


def test_the_published_sprinter_trusts_the_drafts_stop_tokens(rounds):
    """To it they are tokens like others; ours lets the target judge each, so that no text ends on
    the verifier's word."""
    models = counting_pair(16, wrong_behind=6)
    models["draft"].table[6] = -20.0
    models["draft"].table[6, 15] = 20.0
    pair, trusts = (
        Pair(models, Reader(models["target"]), Reader(models["draft"])),
        verifier(16, bias=1e4),
    )
    published = sprinter(pair.target, pair.draft, score_of(trusts), greedy(), [*PROMPT, 1], 8)
    assert published.text[:6] == [2, 3, 4, 5, 6, 15]
    job = run(
        pair,
        "sprinter",
        {"tau": 0.5},
        rounds,
        learned=trusts,
        max_tokens=9,
        stop_token_ids=frozenset({15}),
    )
    assert job.output == list(range(1, 10))
