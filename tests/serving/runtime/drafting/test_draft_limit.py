"""A limit on drafts that changes while a request runs: every strategy obeys, none loses exactness,
and plain decoding needs no draft."""

from __future__ import annotations

from itertools import cycle

import pytest

from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import UNLIMITED, Session
from draftwell.serving.runtime.strategies import STRATEGIES, Strategy, build_strategy
from tests.support.cases import in_turn
from tests.support.models.counters import forwards_of
from tests.support.models.enumeration import law_error
from tests.support.models.resources import NEEDED, decode, table_pair, table_resources
from tests.support.models.variants import VARIANTS

DRAFTING = [name for name in STRATEGIES if name != "autoregressive"]
LIMITS = [(0,), (1,), (2, 0), (0, 3, 1), (UNLIMITED, 0, 0, 1)]


def usual(name: str) -> Strategy:
    return build_strategy(name, NEEDED.get(name, {}), table_resources(8))


def limit_by(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...]) -> None:
    """Another limit behind every forward, of whichever model and in the midst of drafts: wilder
    than any load."""

    def limit(session: Session) -> int:
        stats = session.stats
        return limits[(stats.target_calls + stats.prefill_calls + stats.draft_calls) % len(limits)]

    monkeypatch.setattr(
        Session, "draft_limit", property(limit, lambda session, value: None), raising=False
    )


@pytest.mark.parametrize(("name", "parameters", "limits"), in_turn(VARIANTS, LIMITS), ids=str)
def test_the_joint_law_is_the_targets_however_the_limit_changes(
    monkeypatch, name, parameters, limits
):
    limit_by(monkeypatch, limits)
    models, sampling = (
        table_pair(),
        Sampling(max_tokens=3, temperature=1.0, stop_token_ids=frozenset({2})),
    )

    assert (
        law_error(
            lambda: build_strategy(name, parameters, table_resources()), models, [0, 1, 0], sampling
        )
        < 1e-6
    )


@pytest.mark.parametrize("name", [name for name in DRAFTING if STRATEGIES[name].lossless])
def test_greedy_text_is_the_targets_while_the_limit_moves_between_steps(name):
    alone = decode(table_pair(vocab=8), [1, 2], "autoregressive", max_tokens=40)
    engine, limits = Engine(table_pair(vocab=8)), cycle([0, 2, 5, 1, 0, 0, UNLIMITED])
    jobs = [
        engine.submit([1, 2], Sampling(max_tokens=40), usual(name), next(limits)) for _ in range(3)
    ]
    while engine.jobs:
        for job in jobs:
            job.session.draft_limit = next(limits)
        engine.step()
    assert [job.error for job in jobs] == [None] * 3
    assert [job.output for job in jobs] == [alone.output] * 3


@pytest.mark.parametrize("name", DRAFTING)
def test_a_limit_of_none_is_plain_decoding(name):
    """As many target calls as tokens, and not one forward of a draft: that is what makes it as
    fast."""
    engine = Engine(table_pair(vocab=8))
    plain = engine.generate(
        [1, 2], Sampling(max_tokens=20), build_strategy("autoregressive")
    ).session.stats
    job = engine.submit([1, 2], Sampling(max_tokens=20), usual(name), 0)
    engine.run([job])
    stats = job.session.stats
    assert len(job.output) == 20
    assert (stats.target_calls, stats.target_tokens) == (plain.target_calls, plain.target_tokens)
    assert (stats.draft_calls, stats.qualifier_calls, stats.drafted) == (0, 0, 0)


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("name", [name for name in DRAFTING if name != "sprinter"])
def test_no_verification_is_of_more_draft_tokens_than_the_limit_and_the_one_behind_an_overlap(
    name, limit
):
    models = table_pair(vocab=8, noise=0.1)
    given = forwards_of(models["target"])
    engine = Engine(models, split=False)
    job = engine.submit([1, 2], Sampling(max_tokens=60), usual(name), limit)
    engine.run([job])
    assert len(job.output) == 60
    assert max(row.keep for row in given) <= limit + 1
    assert job.session.stats.drafted > 0


def test_without_a_server_nothing_is_limited():
    job = decode(
        table_pair(vocab=8, noise=0.0),
        [1],
        "vanilla_sd",
        {"num_speculative_tokens": 32},
        max_tokens=60,
    )
    assert job.session.draft_limit == UNLIMITED
    assert max(job.session.stats.judged_at) == 31
