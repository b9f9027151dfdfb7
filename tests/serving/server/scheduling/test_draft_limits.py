"""Drafts of a running scheduler under load: as long as the table says for as many requests, and
never at a price in text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import UNLIMITED
from draftwell.serving.runtime.strategies import (
    STRATEGIES,
    Strategy,
    StrategyResources,
    build_strategy,
)
from draftwell.serving.server.http.requests import CompletionRequest
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.draft_limits import PROBE_EVERY
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import Delta, End, Event, Ticket
from tests.support.models.resources import NEEDED, ORIGIN, table_pair, table_resources
from tests.support.server.scheduler_rounds import letters, turn_until, turn_until_idle

ALONE = {1: 6, 2: 0}
SEEDED = Sampling(max_tokens=40, temperature=1.0, seed=5, repeatable=True)


def drafting(
    name: str = "vanilla_sd",
    table: Mapping[int, int] = ALONE,
    *,
    deterministic: bool = False,
    **parameters: int,
) -> Strategy:
    resources = replace(table_resources(8), deterministic=deterministic)
    strategy = build_strategy(name, parameters, resources)
    strategy.draft_length_by_batch = table
    return strategy


def scheduler(strategy: Strategy, noise: float = 0.5) -> Scheduler:
    return Scheduler(Engine(table_pair(vocab=8, noise=noise)), strategy, 8)


def submit(
    it: Scheduler, max_tokens: int = 60, sampling: Sampling | None = None, **settings
) -> tuple[Ticket, list[Event]]:
    events: list[Event] = []
    sampling = sampling or Sampling(max_tokens=max_tokens)
    ticket = Ticket([1, 2], sampling, TextStream(letters), events.append, **settings)
    it.submit(ticket)
    return ticket, events


def limits(it: Scheduler) -> list[int]:
    return [ticket.job.session.draft_limit for ticket in it._running if ticket.job]


def text_of(events: list[Event]) -> str:
    assert isinstance(events[-1], End)
    return "".join(event.text for event in events if isinstance(event, Delta))


def test_each_round_looks_up_the_length_for_as_many_requests_as_run() -> None:
    it = scheduler(drafting(table={1: 5, 2: 3, 4: 0}, num_speculative_tokens=6))
    one, _ = submit(it, 400)
    it.turn()
    assert limits(it) == [5]
    submit(it, 200)
    it.turn()
    assert limits(it) == [3, 3]
    for _ in range(6):
        submit(it, 20)
    it.turn()
    assert limits(it) == [0] * 8
    before = one.job.session.stats.drafted
    for _ in range(5):
        it.turn()
    assert one.job.session.stats.drafted <= before + 6, "no more than the draft that was under way"
    turn_until(it, lambda: it.running <= 1)
    it.turn()
    assert limits(it) == [5], "the load is gone"
    assert max(one.job.session.stats.judged_at) == 4


def test_without_a_table_a_strategy_drafts_as_configured() -> None:
    it = scheduler(build_strategy("vanilla_sd", {"num_speculative_tokens": 3}))
    tickets = [submit(it, 20)[0] for _ in range(8)]
    it.turn()
    assert limits(it) == [UNLIMITED] * 8
    turn_until_idle(it)
    assert {max(ticket.job.session.stats.judged_at) for ticket in tickets} == {2}


def test_hybrid_without_a_table_drafts_for_a_request_that_is_alone() -> None:
    profile = HardwareProfile(0.2, {1: 1.0, 2: 1.1, 8: 1.2}, 0.0, ORIGIN)
    hybrid = build_strategy(
        "hybrid", {"drafter": "none"}, StrategyResources({"hardware_profile": profile})
    )
    assert hybrid.draft_length_by_batch == {1: 8, 2: 0}
    it = scheduler(hybrid)
    first = submit(it, 400)[0]
    for _ in range(20):
        it.turn()
    assert (before := first.job.session.stats.drafted) > 0
    others = [submit(it, 60)[0] for _ in range(7)]
    it.turn()
    it.turn()
    assert limits(it) == [0] * 8
    assert first.job.session.stats.drafted <= before + 9
    assert all(ticket.job.session.stats.drafted == 0 for ticket in others)


@pytest.mark.parametrize("name", ["vanilla_sd", "spide", "pearl", "duo_decoding", "prompt_lookup"])
def test_the_text_is_the_targets_whatever_the_load(name: str) -> None:
    target = Engine({"target": table_pair(vocab=8)["target"]})
    alone = target.generate([1, 2], Sampling(max_tokens=60), build_strategy("autoregressive"))
    it = scheduler(drafting(name, {1: 4, 2: 2, 4: 1, 8: 0}))
    results = []
    # they come one by one, so that the limit changes under those that run
    for start in range(12):
        results.append(submit(it)[1])
        for _ in range(start % 5):
            it.turn()
    turn_until_idle(it)
    assert {text_of(events) for events in results} == {letters(alone.output)}


def test_models_take_all_cores_while_nobody_overlaps_under_load() -> None:
    it = scheduler(drafting("pearl"))
    submit(it, 400)
    it.turn()
    assert it.engine._workers is not None
    for _ in range(7):
        submit(it, 40)
    turn_until(it, lambda: it.engine._workers is None, rounds=30)
    assert limits(it) == [0] * 8
    turn_until(it, lambda: it.running <= 1)
    turn_until(it, lambda: it.engine._workers is not None, rounds=30)
    it.close()
    it.engine.close()


def test_a_new_request_is_limited_from_its_first_round() -> None:
    it = scheduler(drafting("pearl"))
    tickets = [submit(it, 30)[0] for _ in range(8)]
    it._drop()
    it._admit()
    assert [t.job.session.draft_limit for t in tickets[1:]] == [0] * 7, (
        "an overlap would begin with the prompt"
    )
    turn_until_idle(it)


@pytest.mark.parametrize(
    ("name", "settings", "deterministic"),
    [
        ("vanilla_sd", {"temperature": 1.0, "seed": 5, "repeatable": True}, False),
        ("vanilla_sd", {"temperature": 1.0, "seed": 5, "repeatable": True}, True),
        ("lossy_sd", {"repeatable": True}, False),
        ("lossy_sd", {}, True),
        ("asd", {"temperature": 1.0, "seed": 5, "repeatable": True}, False),
    ],
)
@pytest.mark.parametrize("table", [ALONE, {1: 4, 2: 2}])
def test_an_answer_that_is_to_be_the_same_does_not_depend_on_other_requests(
    name, settings, deterministic, table
) -> None:
    strategy = drafting(name, table, deterministic=deterministic)
    texts = []
    for others in (0, 7):
        it = scheduler(strategy, noise=2.0)
        for _ in range(others):
            submit(it, 40, strategy=drafting())
        _, events = submit(it, sampling=Sampling(max_tokens=60, **settings))
        turn_until_idle(it)
        texts.append(text_of(events))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("repeatable", [False, True])
def test_drafts_of_sampled_requests_of_an_exact_strategy_are_limited(
    deterministic: bool, repeatable: bool
) -> None:
    """A limit changes no answer: a seed has one, and a random seed repeats nothing."""
    it = scheduler(drafting(deterministic=deterministic))
    for _ in range(8):
        submit(it, sampling=replace(SEEDED, repeatable=repeatable))
    it.turn()
    assert limits(it) == [0] * 8


@pytest.mark.parametrize(
    ("others", "patience"),
    [
        ([], None),
        ([("vanilla_sd", {1: 3})], 4),
        ([("vanilla_sd", ALONE)], 0),
        ([("autoregressive", {})], 0),
        ([("vanilla_sd", {1: 3}), ("svip", {})], 4),
        ([("vanilla_sd", ALONE), ("svip", {})], 0),
    ],
)
def test_the_target_waits_for_drafts_without_a_limit_no_longer_than_for_others(
    others: list[tuple[str, dict[int, int]]], patience: int | None
) -> None:
    it = scheduler(drafting())
    submit(it, sampling=SEEDED, strategy=drafting("lossy_sd"))
    for name, table in others:
        submit(it, strategy=drafting(name, table))
    it.turn()
    assert it.engine.patience == patience


@pytest.mark.parametrize(
    ("name", "asked", "probed"),
    [
        ("vanilla_sd", {}, True),
        ("vanilla_sd", {"temperature": 1.0}, False),
        ("vanilla_sd", {"temperature": 1.0, "repeatable": True}, True),
        ("lossy_sd", {}, False),
    ],
)
def test_a_recorded_request_is_probed_only_where_that_changes_no_answer(
    name: str, asked: dict[str, Any], probed: bool
) -> None:
    it = scheduler(drafting(name))
    sampling = Sampling(max_tokens=200, **asked)
    tickets = [submit(it, sampling=sampling)[0] for _ in range(8)]
    it.turn()
    tickets[3].job.session.recorded = True
    probes = []
    for _ in range(PROBE_EVERY):
        it.turn()
        probes.append(limits(it))
    assert [max(of) for of in zip(*probes, strict=True)] == [0, 0, 0, int(probed), 0, 0, 0, 0]


@pytest.mark.parametrize("rounds_before", range(4))
@pytest.mark.parametrize("length", [1, 3])
def test_a_probe_is_drafted_whatever_the_rounds_of_others(length: int, rounds_before: int) -> None:
    """Beside a request without a table a verification may take several steps."""
    it = scheduler(drafting())
    for _ in range(rounds_before):
        submit(it, 1)
        it.turn()
    recorded = submit(it, 400)[0]
    submit(it, 400)
    submit(it, 400, strategy=drafting("vanilla_sd", {}, num_speculative_tokens=length))
    it.turn()
    recorded.job.session.recorded = True
    before = recorded.job.session.stats.drafted
    for _ in range(3 * PROBE_EVERY):
        it.turn()
    assert 2 <= recorded.job.session.stats.drafted - before <= 4


@pytest.mark.parametrize(
    ("name", "parameters"), [("lookahead", {}), ("swift", {"max_draft": 4}), ("vanilla_sd", {})]
)
def test_a_length_as_long_as_configured_is_no_limit(name: str, parameters: dict[str, int]) -> None:
    """A window of lookahead, and swift's search for sublayers, need more room than a draft."""
    strategy = build_strategy(name, parameters, table_resources(8))
    assert strategy.longest_draft
    strategy.draft_length_by_batch = {1: strategy.longest_draft, 2: 1, 4: 0}
    assert [strategy.draft_limit(running) for running in (1, 2, 3)] == [UNLIMITED, 1, 0]


def test_every_strategy_that_drafts_says_how_long_drafts_are() -> None:
    """Else no length is tuned by load, silently."""
    strategies = [build_strategy(n, NEEDED.get(n, {}), table_resources(8)) for n in STRATEGIES]
    silent = [strategy.name for strategy in strategies if not strategy.longest_draft]
    assert silent == ["autoregressive"], "declare length_field"
    fields = {one.name: one.length_field for one in strategies if one.length_field}
    configs = {one.name: type(one.config).model_fields for one in strategies}
    assert [name for name, field in fields.items() if field not in configs[name]] == []


@pytest.mark.parametrize(
    ("name", "field"),
    [(n, "num_speculative_tokens") for n in ("pearl", "duo_decoding")] + [("double", "passes")],
)
def test_strategies_that_measure_their_length_say_how_long_it_is(name: str, field: str) -> None:
    assert build_strategy(name, {}, table_resources(8)).longest_draft
    assert build_strategy(name, {field: 4}).longest_draft == 4
    assert build_strategy(name, {}).longest_draft is None


def test_a_seed_in_a_request_asks_for_the_same_answer() -> None:
    for body, repeatable in (({"seed": 3}, True), ({"seed": 0}, True), ({}, False)):
        settings = CompletionRequest(model="pair", prompt="hello", **body).sampling_settings()
        assert Sampling(**settings).repeatable == repeatable
