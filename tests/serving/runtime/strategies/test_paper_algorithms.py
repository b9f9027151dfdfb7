"""SPIDE and CSD against their papers' algorithms (`tests/support/published`), written down line by
line: the same tokens, rounds and counts from the same seeds, and the same laws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.models.enumeration import Oracle, distance, law_of, run_once, true_law
from tests.support.models.resources import ORIGIN, decode, table_resources
from tests.support.published.csd import csd
from tests.support.published.decoding import Reader
from tests.support.published.pairs import (
    PROMPT,
    Pair,
    Seen,
    kinds_of,
    llamas,
    pairs,
    rounds_seen,
    tables,
)
from tests.support.published.spide import Letter, MappingTable, spide

TOTAL = [20 + b for b in range(20)]
ACCEPTED = [round(total * (0.3 + 0.035 * b)) for b, total in enumerate(TOTAL)]
"""An acceptance table in which no interval is empty; what it holds is not what these pairs do."""


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The rounds of our strategy, as long as somebody clears the list between requests."""
    return rounds_seen(monkeypatch)


def some_pairs(*, with_llamas: bool) -> list[Pair]:
    """Tables, and transformers, which a reader without a cache takes long to read."""
    return [*pairs()[:3], *([llamas()] if with_llamas else [])]


def warm(pair: Pair, temperature: float) -> Pair:
    """The same pair for sampled requests."""
    return pair._replace(
        target=Reader(pair.target.model, temperature), draft=Reader(pair.draft.model, temperature)
    )


def spide_resources(s: float) -> StrategyResources:
    """`s` draft steps fit into a verification; the prior weighs nothing, as in the paper."""
    table = AcceptanceTable(TOTAL, ACCEPTED, ORIGIN, prior_weight=1e-9)
    return replace(table_resources(ratio=s, acceptance_table=table), deterministic=False)


# SPIDE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("s", "tau"), [(1, 0.7), (4, 0.35)])
def test_spide_is_algorithm_1_behind_a_first_token_of_the_target(rounds, s, tau, temperature):
    """Tokens, rounds, target calls and the table after the request, from the same seeds. Ours
    samples the first token from the prompt's pass; Algorithm 1 begins to draft."""
    happened: set[str] = set()
    budget = 24 if s == 4 else 40
    for seed, pair in enumerate(some_pairs(with_llamas=s == 4)):
        rounds.clear()
        pair, resources = warm(pair, temperature), spide_resources(s)
        job = decode(
            pair.models,
            PROMPT,
            "spide",
            {"tau": tau},
            resources,
            temperature=temperature,
            seed=seed,
            max_tokens=budget,
        )
        streams, table = Streams(seed), MappingTable(TOTAL, ACCEPTED)
        first = streams.sample.draw(pair.target.probs(PROMPT)) if temperature else None
        first = pair.target.best(PROMPT) if first is None else first
        paper = spide(pair.target, pair.draft, streams, [*PROMPT, first], budget - 1, s, tau, table)
        assert job.output == [first, *paper.text]
        assert rounds == paper.rounds
        assert job.session.stats.target_calls == len(paper.rounds)
        ours = resources.artifacts["acceptance_table"]
        assert isinstance(ours, AcceptanceTable)
        assert (ours.total, ours.accepted) == (table.total, table.accepted)
        happened |= kinds_of(rounds)
    assert happened == {"all", "some", "none"}


def test_the_intervals_of_figure_4_are_our_bins():
    """Their names are the paper's; 1.0 is what the authors' bfloat16 rounds to it."""
    for i in range(4000):
        confidence = (i + 0.5) / 4000
        assert MappingTable.interval(confidence) == AcceptanceTable.bin_of(confidence)
    assert MappingTable.interval(1 - 2**-9) == AcceptanceTable.bin_of(1 - 2**-9) == 19


def spide_law(pair: Pair, budget: int, s: int, letter: Letter) -> dict[Any, float]:
    """Law of texts and rounds of Algorithm 1 behind a first token of the target."""

    def one(oracle: Oracle) -> Any:
        first = oracle.draw(pair.target.probs(PROMPT))
        table = MappingTable(TOTAL, ACCEPTED)
        decoded = spide(
            pair.target, pair.draft, oracle, [*PROMPT, first], budget - 1, s, 0.6, table, letter
        )
        return tuple([first, *decoded.text][:budget]), tuple(decoded.rounds)

    return law_of(one)


def texts(law: dict[Any, float]) -> dict[Any, float]:
    """The law of the texts alone."""
    total: dict[Any, float] = {}
    for (text, _), mass in law.items():
        total[text] = total.get(text, 0.0) + mass
    return total


@pytest.mark.parametrize("s", [1, 2])
def test_sampled_spide_has_the_law_of_algorithm_1(rounds, s):
    pair, sampling = tables(3, vocab=2, temperature=1.0), Sampling(max_tokens=4, temperature=1.0)

    def ours(oracle: Oracle) -> Any:
        rounds.clear()
        strategy = build_strategy("spide", {"tau": 0.6}, spide_resources(s))
        job = run_once(strategy, pair.models, PROMPT, sampling, oracle)
        return tuple(job.output), tuple(rounds)

    law = spide_law(pair, 4, s, Letter.NONE)
    assert distance(law_of(ours), law) < 1e-6
    assert distance(texts(law), true_law(pair.models["target"], PROMPT, sampling)) < 1e-6
    assert len({made for _, made in law}) > 3


@pytest.mark.parametrize("letter", [Letter.NEVER_ALL, Letter.TWICE], ids=str)
def test_algorithm_1_to_the_letter_is_not_lossless(letter):
    """The reading that decodes exactly, which is ours, is the right one: the paper promises the
    target's distribution (section 3.1)."""
    pair, sampling = tables(3, vocab=2, temperature=1.0), Sampling(max_tokens=4, temperature=1.0)
    truth = true_law(pair.models["target"], PROMPT, sampling)
    assert distance(texts(spide_law(pair, 4, 2, letter)), truth) > 1e-3


# CSD


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize(("frequency", "tau"), [(1, 0.01), (2, 0.3), (math.inf, 0.01)])
def test_csd_is_algorithm_1_behind_a_first_token_of_the_target(rounds, frequency, tau, temperature):
    """Tokens, rounds, rescues and the memory, which two requests fill in turn."""
    saved, budget = 0, 24 if frequency == 1 else 40
    for seed, pair in enumerate(some_pairs(with_llamas=frequency == 1)):
        pair = warm(pair, temperature)
        memory = CorrectionMemory({(1, 2): 1, (3, 4): 5}, ORIGIN)
        resources = replace(table_resources(correction_memory=memory), deterministic=False)
        counts = dict(memory.counts)
        for request in (seed, seed + 100):
            rounds.clear()
            job = decode(
                pair.models,
                PROMPT,
                "csd",
                {"min_count": frequency, "tau": tau, "num_speculative_tokens": 6},
                resources,
                temperature=temperature,
                seed=request,
                max_tokens=budget,
            )
            streams = Streams(request)
            first = streams.sample.draw(pair.target.probs(PROMPT)) if temperature else None
            first = pair.target.best(PROMPT) if first is None else first
            behind = [*PROMPT, first]
            paper, rescued = csd(
                pair.target, pair.draft, streams, behind, budget - 1, 6, counts, frequency, tau
            )
            assert job.output == [first, *paper.text]
            assert rounds == paper.rounds
            assert job.session.stats.rescued == rescued
            assert memory.counts == counts
            saved += rescued
    assert (saved == 0) == (frequency == math.inf)


@pytest.mark.parametrize(("frequency", "tau"), [(1, 0.3), (2, 0.01)])
def test_sampled_csd_has_the_law_of_algorithm_1(rounds, frequency, tau):
    """Of texts, rounds and what the memory holds at the end."""
    pair, sampling = tables(3, vocab=3, temperature=1.0), Sampling(max_tokens=4, temperature=1.0)
    known = {(0, 1): 1, (1, 2): 2, (2, 0): 1}

    def ours(oracle: Oracle) -> Any:
        rounds.clear()
        memory = CorrectionMemory(known, ORIGIN)
        resources = replace(table_resources(correction_memory=memory), deterministic=False)
        settings = {"min_count": frequency, "tau": tau, "num_speculative_tokens": 2}
        job = run_once(
            build_strategy("csd", settings, resources), pair.models, PROMPT, sampling, oracle
        )
        return tuple(job.output), tuple(rounds), tuple(sorted(memory.counts.items()))

    def paper(oracle: Oracle) -> Any:
        first, memory = oracle.draw(pair.target.probs(PROMPT)), dict(known)
        decoded, _ = csd(
            pair.target, pair.draft, oracle, [*PROMPT, first], 3, 2, memory, frequency, tau
        )
        return (
            (first, *decoded.text),
            tuple(decoded.rounds),
            tuple(sorted(memory.items())),
        )

    law = law_of(paper)
    assert distance(law_of(ours), law) < 1e-6
    assert len({memory for *_, memory in law}) > 2
