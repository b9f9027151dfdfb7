"""Double: the target's own text and law whatever is looked up, and what looking up saves."""

from __future__ import annotations

from typing import Any

import pytest

from draftwell.serving.runtime.drafting.ngram import NGramIndex
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.strategies.lossless.double import Double, agreeing, same
from draftwell.serving.runtime.types import Draft
from tests.support.models.counters import counters
from tests.support.models.enumeration import law_error
from tests.support.models.resources import (
    counting_pair,
    decode,
    table_pair,
    table_resources,
)
from tests.support.published.pairs import llamas

SHORT = {"passes": 2, "max_matching_ngram_size": 1, "guess_tokens": 3}
REPEATED = [1, 0, 1, 1, 0]


def off(kind: type[Double] = Double, tokens: int = 3, **changed: Any) -> float:
    """Distance of the law of some tokens from the target's, after a text that repeats itself."""
    config = Double.Config(**SHORT | changed)
    return law_error(
        lambda: kind(config, table_resources(2)),
        table_pair(vocab=2, seed=5),
        REPEATED,
        Sampling(max_tokens=tokens, temperature=1.0),
    )


@pytest.mark.parametrize(("passes", "guess_tokens"), [(1, 2), (1, 4), (2, 1)])
def test_three_tokens_have_the_targets_law(passes, guess_tokens):
    assert off(passes=passes, guess_tokens=guess_tokens) < 1e-6


class ByOtherRows(Double):
    """Judges the guess behind a correction on the rows of the round's beginning."""

    first: Any = None

    def judge(self, judged: Draft, chain: Draft, rows: Any, session: Any) -> Any:
        behind = judged is chain
        self.first = self.first if behind else rows
        used = self.first[: len(rows)] if behind else rows
        return (yield from super().judge(judged, chain, used, session))


FEW: dict[str, Any] = {"tokens": 4, "passes": 1, "guess_tokens": 2}


def test_mutant_that_judges_guidance_by_other_rows_is_caught():
    assert off(**FEW) < 1e-6
    assert off(ByOtherRows, **FEW) > 1e-3


@pytest.mark.parametrize("stop", [frozenset(), frozenset({3})], ids=["", "stop"])
@pytest.mark.parametrize("passes", [1, 3])
def test_greedy_text_is_transformers_own(passes, stop):
    """Two transformers in float32; the other text by whole passes of their own modules, without
    keys and values."""
    pair, prompt = llamas(), [1, 0, 4, 1, 0, 4, 1]
    wanted = list(prompt)
    for _ in range(24):
        wanted.append(pair.target.best(wanted))
        if wanted[-1] in stop:
            break
    settings = {"passes": passes, "max_matching_ngram_size": 2}
    sampling = {"max_tokens": 24, "stop_token_ids": stop}
    job = decode(pair.models, prompt, "double", settings, table_resources(8), **sampling)
    assert job.output == wanted[len(prompt) :]
    plain = decode(pair.models, prompt, "autoregressive", **sampling)
    assert job.output == plain.output
    stats = job.session.stats
    assert stats.accepted + stats.sampled == stats.emitted == len(job.output)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("passes", [1, 3])
def test_without_guesses_it_is_pearl(passes, temperature):
    models, settings = table_pair(8), {"max_tokens": 60, "temperature": temperature, "seed": 3}
    bare = {"passes": passes, "guess_tokens": 0}
    mine = decode(models, [1, 2], "double", bare, table_resources(8), **settings)
    pearl = {"num_speculative_tokens": passes}
    other = decode(models, [1, 2], "pearl", pearl, table_resources(8), **settings)
    assert mine.output == other.output
    assert counters(mine.session.stats) == counters(other.session.stats)


def test_looking_up_saves_passes_of_both_models():
    """A text that soon repeats itself: no order of more than one token, and greedy."""
    models = table_pair(8, noise=0.2)
    bare, both = (
        Engine(models)
        .generate(
            [1, 2],
            Sampling(max_tokens=80),
            Double(Double.Config(passes=3, guess_tokens=length), table_resources(8)),
        )
        .session.stats
        for length in (0, 8)
    )
    assert both.target_calls < 0.6 * bare.target_calls
    assert both.draft_calls / both.drafted < 0.5 * bare.draft_calls / bare.drafted


def test_a_round_counts_once_also_where_the_guess_behind_a_correction_is_judged():
    settings, sampling = {"passes": 3, "max_matching_ngram_size": 1}, {"temperature": 1.0}
    for noise in (0.2, 1.0, 2.0, 4.0):
        models = table_pair(4, noise=noise)
        job = decode(
            models, [1, 2], "double", settings, table_resources(4), max_tokens=60, **sampling
        )
        stats = job.session.stats
        assert stats.verdicts == stats.target_calls
        assert stats.rounds == stats.judged_at[0] <= stats.target_calls
        assert list(stats.judged_at.values()) == sorted(stats.judged_at.values(), reverse=True)
        assert stats.accepted + stats.sampled == stats.emitted == 60
        assert sum(stats.accepted_at.values()) == stats.accepted <= stats.judged <= stats.drafted


def test_a_place_that_draft_and_guess_agree_on_is_drafted_once():
    models, settings = counting_pair(8), {"passes": 2, "guess_tokens": 4}
    prompt = [*range(8), *range(8)]
    job = decode(models, prompt, "double", settings, table_resources(8), max_tokens=60)
    stats = job.session.stats
    assert stats.accepted <= stats.drafted <= 60
    assert stats.target_calls < 30, "guesses are read"


class Limited(Double):
    """No draft after the first rounds, while tokens are unverified."""

    held = 0

    def drafted(self, index: NGramIndex, session: Session, pending: Draft, *rest: Any) -> Any:
        if session.stats.verdicts >= 2 and len(pending):
            self.held, session.draft_limit = max(self.held, len(pending)), 0
        return (yield from super().drafted(index, session, pending, *rest))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_limit_that_falls_to_nothing_verifies_what_is_pending(temperature):
    models, asked = table_pair(8), {"max_tokens": 40, "temperature": temperature, "seed": 3}
    limited = Limited(Double.Config(passes=4), table_resources(8))
    sampling = Sampling(**asked, repeatable=True)
    job = Engine(models).generate([1, 2], sampling, limited)
    plain = Engine(models).generate([1, 2], sampling, build_strategy("autoregressive"))
    assert limited.held > 1
    assert job.output == plain.output
    assert job.session.stats.target_calls > 20, "and decodes plainly from there"


@pytest.mark.parametrize(
    ("new", "guess", "judged"),
    [
        ([], [], []),
        ([], [5, 6], [5, 6]),
        ([5], [5, 6, 7], [5, 6, 7]),
        ([5, 6], [5, 6], [5, 6]),
        ([5, 6, 7, 8], [5, 6], [5, 6, 7]),
        ([5, 9, 7], [5, 6, 7], [5, 9]),
        ([4, 5], [], [4]),
    ],
)
def test_what_the_target_has_rows_for(new, guess, judged):
    assert agreeing(Draft(new), Draft(guess)).tokens == judged


def test_how_many_tokens_are_the_same():
    assert [same([1, 2, 3], other) for other in ([1, 2], [1, 2, 3, 4], [2], [1, 3, 3])] == [
        2,
        3,
        0,
        1,
    ]
