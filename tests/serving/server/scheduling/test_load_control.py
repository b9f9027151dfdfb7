"""Drafts of a running scheduler under load: limited by what rounds show, lifted when the load goes,
and never at a price in text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.recording.prompt_ratings import RatedPrompt
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import UNLIMITED
from draftwell.serving.runtime.strategies import Strategy, StrategyResources, build_strategy
from draftwell.serving.server.http.requests import CompletionRequest
from draftwell.serving.server.scheduling import draft_length
from draftwell.serving.server.scheduling.costs import BatchCosts
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.load_control import PROBE_EVERY, LoadControl
from draftwell.serving.server.scheduling.recent_traffic import Acceptance, UsualLoad
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import Delta, End, Event, Ticket
from tests.support.models.resources import ORIGIN, table_pair, table_resources
from tests.support.server.scheduler_rounds import letters, turn_until, turn_until_idle

VANILLA = build_strategy("vanilla_sd", {"num_speculative_tokens": 6})
AUTOREGRESSIVE = build_strategy("autoregressive")
COMPUTE_BOUND = BatchCosts({1: 0.2, 8: 0.8}, {1: 1.0, 2: 1.1, 8: 4.0, 64: 32.0})
"""One request verifies for next to nothing, eight pay for every token."""


def scheduler(
    costs: BatchCosts, slots: int = 8, strategy: Strategy = VANILLA, noise: float = 0.5
) -> Scheduler:
    return Scheduler(
        Engine(table_pair(vocab=8, noise=noise)), strategy, slots, load=LoadControl(costs)
    )


def submit(it: Scheduler, max_tokens: int = 60, **settings) -> tuple[Ticket, list[Event]]:
    events: list[Event] = []
    ticket = Ticket(
        [1, 2], Sampling(max_tokens=max_tokens), TextStream(letters), events.append, **settings
    )
    it.submit(ticket)
    return ticket, events


def limits(it: Scheduler) -> list[int]:
    return [ticket.job.session.draft_limit for ticket in it._running if ticket.job]


def simulate(it: Scheduler, draft: float, target: Callable[[int], float]) -> None:
    """Let the clock of rounds go by the passes that are run: seconds of a draft pass, and of a
    target pass over so many tokens."""
    now = [0.0]
    it.engine.meter.clock = lambda: now[0]
    for role, model in it.engine.models.items():

        def forward(rows, role=role, run=model.forward):
            now[0] += (
                target(sum(len(row.tokens) for row in rows))
                if role == "target"
                else draft * max(row.steps for row in rows)
            )
            return run(rows)

        model.forward = forward  # type: ignore[method-assign]


def keep_busy(it: Scheduler, requests: int, rounds: int, **settings) -> None:
    """Rounds in which as many requests run all the time."""
    for _ in range(rounds):
        while it.running + it.waiting < requests:
            submit(it, 120, **settings)
        it.turn()


def test_alone_it_drafts_as_tuned_and_among_many_it_does_not():
    it = scheduler(COMPUTE_BOUND)
    one, _ = submit(it, 400)
    for _ in range(20):
        it.turn()
    assert limits(it) == [UNLIMITED]
    assert max(one.job.session.stats.judged_at) == 5
    for _ in range(7):
        submit(it, 20)
    it.turn()
    assert limits(it) == [0] * 8
    before = one.job.session.stats.drafted
    for _ in range(5):
        it.turn()
    assert one.job.session.stats.drafted <= before + 6, "no more than the draft that was under way"
    turn_until(it, lambda: it.running <= 1)
    it.turn()
    assert limits(it) == [UNLIMITED], "the load is gone"


def test_a_prediction_has_a_limit_of_its_own():
    """By its own acceptance and the verification's cost alone: also where the strategy does not
    draft, and where it has no limit."""
    cheap = BatchCosts({1: 0.9, 8: 4.0}, {1: 1.0, 64: 1.2, 512: 2.0})
    for costs, strategy, used in (
        (cheap, VANILLA, True),
        (COMPUTE_BOUND, VANILLA, False),
        (COMPUTE_BOUND, AUTOREGRESSIVE, False),
    ):
        control, sampling = LoadControl(costs), Sampling(prediction=(1, 2))
        assert control.predicted_limit(strategy, 1, sampling) == UNLIMITED
        assert (control.predicted_limit(strategy, 8, sampling) > 0) == used
        assert (
            control.predicted_limit(
                strategy, 8, Sampling(temperature=1.0, prediction=(1, 2), repeatable=True)
            )
            == UNLIMITED
        )
    control = LoadControl(cheap)
    before = control.predicted_limit(VANILLA, 8, sampling)
    control.predictions.learn(2000, 0)
    assert control.predicted_limit(VANILLA, 8, sampling) == 0 < before


def test_what_becomes_of_predictions_is_learnt_under_load():
    answer = (
        Engine(table_pair(vocab=8)).generate([1, 2], Sampling(max_tokens=40), AUTOREGRESSIVE).output
    )
    it = scheduler(
        BatchCosts({1: 0.9, 8: 4.0}, {1: 1.0, 64: 1.2, 512: 2.0}), strategy=AUTOREGRESSIVE
    )
    for _ in range(2):
        it.submit(
            Ticket(
                [1, 2],
                Sampling(max_tokens=40, prediction=tuple(answer)),
                TextStream(letters),
                [].append,
            )
        )
    turn_until_idle(it)
    assert it.load is not None
    assert it.load.predictions.judged == it.load.predictions.accepted > 10
    assert "autoregressive" not in it.load.acceptance


class RenewedAnytime(LoadControl):
    """Another thread switches bundles whenever a draft length has been chosen."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "current" and value is not None:
            self.renew(COMPUTE_BOUND)


def test_a_switch_of_bundles_at_any_moment_fails_no_round():
    control = RenewedAnytime(COMPUTE_BOUND)
    it = Scheduler(Engine(table_pair(vocab=8)), VANILLA, 8, load=control)
    results = [submit(it, 20)[1] for _ in range(8)]
    turn_until_idle(it)
    assert all(isinstance(events[-1], End) for events in results)


def test_costs_of_another_bundle_are_taken_up_by_the_next_round():
    it = scheduler(COMPUTE_BOUND)
    keep_busy(it, 8, 20)
    assert it.load is not None
    taught, current, other = (
        it.load.acceptance,
        it.load.current,
        replace(COMPUTE_BOUND, source="another bundle"),
    )
    assert current is not None
    it.load.renew(other)
    assert it.load.current is current, "the round that runs goes on with what it has"
    it.turn()
    assert it.load.costs is other
    assert it.load.acceptance is not taught
    assert all(known is not current for known in it.load.lengths.values())


def test_the_text_is_the_targets_whatever_the_load():
    alone = Engine({"target": table_pair(vocab=8)["target"]}).generate(
        [1, 2], Sampling(max_tokens=60), build_strategy("autoregressive")
    )
    for name in ("vanilla_sd", "spide", "pearl", "duo_decoding", "prompt_lookup"):
        it = scheduler(COMPUTE_BOUND, strategy=build_strategy(name, {}, table_resources(8)))
        results = []
        # they come one by one, so that the limit changes under those that run
        for start in range(12):
            results.append(submit(it)[1])
            for _ in range(start % 5):
                it.turn()
        turn_until_idle(it)
        for events in results:
            assert isinstance(events[-1], End)
            assert "".join(e.text for e in events if isinstance(e, Delta)) == letters(
                alone.output
            ), name


def test_where_verification_is_free_eight_draft_as_much_as_is_best_for_one():
    costs = BatchCosts({1: 0.1}, {1: 1.0})
    it = scheduler(costs)
    for _ in range(8):
        submit(it, 20)
    it.turn()
    assert limits(it) == [costs.best_gamma(1, Acceptance.USUAL)] * 8 == [4] * 8


def test_drafts_longer_than_is_best_are_cut_also_where_the_best_is_as_short_for_one():
    costs = BatchCosts({1: 0.5}, {1: 1.0})  # six draft tokens take longer than plain decoding
    assert costs.seconds_per_token(4, 6, 0.7) > costs.seconds_per_token(4, 0, 0.7)
    best = costs.best_gamma(1, 0.7)
    assert best == costs.best_gamma(4, 0.7)
    control = LoadControl(costs)
    assert control.limit(VANILLA, 4) == best
    assert control.limit(VANILLA, 1) == UNLIMITED


def test_poor_drafts_are_given_up_and_noticed_when_they_are_good_again():
    it = scheduler(BatchCosts({1: 0.1}, {1: 1.0, 64: 3.0}), slots=4)
    simulate(it, 0.1, lambda tokens: 1.0 + tokens / 32)
    good = it.engine.models["target"].table
    it.engine.models["draft"].table = good.roll(1, -1)  # always another token
    keep_busy(it, 4, 600)
    assert it.load.acceptance["vanilla_sd"].rate < 0.3
    assert it.load.draft_length == 0
    before = it.load.switches
    it.engine.models["draft"].table = good
    keep_busy(it, 4, 3000)
    assert it.load.draft_length >= 2
    assert it.load.switches > before
    assert it.load.acceptance["vanilla_sd"].rate > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("believed", "true"),
    [
        # drafts are said to cost nothing, and cost as much as tokens
        (BatchCosts({1: 0.0}, {1: 1.0}), lambda tokens: 0.5 * tokens),
        (BatchCosts({1: 1.0, 64: 64.0}, {1: 1.0, 64: 64.0}), lambda tokens: 1.0),
    ],
    ids=["too cheap", "too dear"],
)
def test_what_rounds_take_counts_more_than_what_was_predicted(believed, true):
    it = scheduler(believed, slots=4, noise=1.0)
    simulate(it, 0.05, true)
    keep_busy(it, 4, 1)
    start = it.load.draft_length
    keep_busy(it, 4, 4000)
    assert (
        (start > 2, it.load.draft_length) == (True, 0)
        if believed.draft[1] == 0.0
        else (start == 0, it.load.draft_length > 0)
    )
    assert 0.0 < it.load.control_share < 0.3


def test_blocks_of_plain_decoding_are_plain_decoding():
    """A control that is limited only on paper, or one request at a time, compares drafts with
    drafts."""
    it = scheduler(BatchCosts({1: 0.1}, {1: 1.0}), slots=4)
    simulate(it, 0.1, lambda tokens: 1.0 + tokens / 64)
    keep_busy(it, 4, 40)
    assert it.load.draft_length > 0
    plain = 0
    for _ in range(600):
        control = it.load.current
        # drafts that began before are over
        counted = control.trial == 0 and len(control._block) > 0
        before = [(ticket.job.session, ticket.job.session.stats.drafted) for ticket in it._running]
        it.turn()
        if counted and control.trial == 0:
            assert [session.stats.drafted for session, _ in before] == [
                drafted for _, drafted in before
            ]
            plain += 1
        keep_busy(it, 4, 1)
    assert plain >= 3


def test_requests_that_come_and_go_are_one_kind_of_load():
    """Two answers of eight end, and others begin some rounds later: no draft begins or ends for
    that. Half as many for long are another."""
    load, kinds = UsualLoad(), set[float]()
    load.beside(8, 200.0)

    def counted(rounds: int, *counts: int) -> int:
        for number in range(rounds):
            now = counts[number // 4 % len(counts)]
            load.learn(now, 200.0)
            found, _ = load.beside(now, 200.0)
            kinds.add(found)
        return found

    assert counted(64, 8, 6, 7) == 8
    assert kinds == {8}
    assert counted(400, 4) == 4
    assert counted(1, 8) == 8, "more are seen at once"


class Seconds:
    """The clock of rounds: a millisecond for each, and whatever a test adds."""

    def __init__(self, it: Scheduler):
        self.now = 0.0
        simulate(it, 0.0, lambda tokens: 0.001)
        of_passes = it.engine.meter.clock
        it.engine.meter.clock = lambda: self.now + of_passes()


@pytest.mark.parametrize("between", ["alone", "plain decoding", "nobody"])
@pytest.mark.parametrize(("seconds", "forgets"), [(0.0, False), (10_000.0, True)])
def test_a_load_that_comes_back_after_long_is_measured_again(between, seconds, forgets):
    """A machine of another hour may be slower: a new block says nothing beside the speed of
    then."""
    it = scheduler(BatchCosts({1: 0.1}, {1: 1.0}), slots=4)
    clock = Seconds(it)
    keep_busy(it, 4, 1)
    turn_until(it, lambda: it.load.current._speed.count > 5)
    known = it.load.current
    turn_until_idle(it)
    {
        "alone": lambda: submit(it, 3),
        "plain decoding": lambda: [submit(it, 3, strategy=AUTOREGRESSIVE) for _ in range(4)],
        "nobody": lambda: None,
    }[between]()
    turn_until_idle(it)
    clock.now += seconds
    for _ in range(4):
        submit(it, 120)
    it.turn()
    assert it.load.current is known, "the same kind of load"
    assert (known._speed.count == 0) == forgets
    assert known.trial is None


def test_one_request_with_a_limit_beside_seven_without_is_another_load_than_eight():
    it = scheduler(COMPUTE_BOUND)
    keep_busy(it, 8, 3)
    eight = it.load.current
    turn_until_idle(it)
    for _ in range(7):
        submit(it, 60, strategy=AUTOREGRESSIVE)
    submit(it, 60)
    it.turn()
    assert it.load.current is not eight
    assert it.load.given == sum(limit for limit in limits(it) if limit != UNLIMITED)


def test_lengths_that_are_only_predicted_stay_what_they_are():
    """For comparison with what is measured: no block, and no other length, however wrong the
    prediction is."""
    it = scheduler(BatchCosts({1: 0.0}, {1: 1.0}), slots=4, noise=1.0)
    it.load.measured = False
    simulate(it, 0.05, lambda tokens: 0.5 * tokens)  # a token of a draft costs as much as another
    keep_busy(it, 4, 1)
    start = it.load.draft_length
    assert start > 2
    keep_busy(it, 4, 600)
    assert it.load.control_share == it.load.switches == 0
    assert it.load.draft_length == it.load.current.in_force > 0


def test_requests_whose_drafts_are_kept_get_the_longer_ones():
    it = scheduler(BatchCosts({1: 0.1}, {1: 1.0, 64: 2.0}), slots=4, noise=0.0)
    simulate(it, 0.1, lambda tokens: 1.0 + tokens / 64)
    keep_busy(it, 4, 3)
    sessions = [ticket.job.session for ticket in it._running]
    for number, session in enumerate(sessions):
        it.load._own[session].learn(200, 190 if number < 2 else 10)
    it.load._limit_drafts(
        [(session, VANILLA) for session in sessions], [(session, VANILLA) for session in sessions]
    )
    assert it.load.draft_length > 0
    assert min(limits(it)[:2]) > max(limits(it)[2:])
    assert sum(limits(it)) <= 4 * it.load.current.length


def test_a_longer_context_makes_drafts_dearer():
    costs = BatchCosts({1: 0.1}, {1: 1.0, 64: 2.0}, per_context={"draft": 0.001}, context=32)
    control = LoadControl(costs)
    short, long = (control._predicted([VANILLA], 4, context) for context in (32.0, 4096.0))
    assert long[0] == short[0]
    assert long[4] / long[0] < short[4] / short[0]
    short, long = (control._known([VANILLA], 4, context, 1.0) for context in (200.0, 4000.0))
    assert short is not long, "each is measured for itself"
    assert control._known([VANILLA], 4, 210.0, 1.0) is short


def test_strategies_are_limited_each_by_its_own_acceptance_and_its_own_costs():
    control = LoadControl(BatchCosts({1: 1.0}, {1: 1.0, 64: 2.0}))
    control.acceptance["vanilla_sd"] = Acceptance(judged=1000, accepted=100)
    control.acceptance["prompt_lookup"] = Acceptance(judged=1000, accepted=900)
    assert control.limit(build_strategy("vanilla_sd"), 4) == 0
    assert control.limit(build_strategy("prompt_lookup"), 4) > 0, "n-grams cost nothing"
    assert control.limit(build_strategy("autoregressive"), 4) == UNLIMITED
    assert control.describe()["draft_limits"]["vanilla_sd"] == 0


def test_hybrid_drafts_for_a_request_that_is_alone():
    profile = HardwareProfile(0.2, {1: 1.0, 2: 1.1, 8: 1.2}, 0.0, ORIGIN)
    hybrid = build_strategy(
        "hybrid", {"drafter": "none"}, StrategyResources({"hardware_profile": profile})
    )
    it = scheduler(BatchCosts({1: 0.1}, {1: 1.0}), strategy=hybrid)
    first = submit(it, 400)[0]
    for _ in range(20):
        it.turn()
    assert limits(it) == [UNLIMITED]
    assert (before := first.job.session.stats.drafted) > 0
    others = [submit(it, 60)[0] for _ in range(7)]
    it.turn()
    it.turn()
    assert limits(it) == [0] * 8, (
        "its prices are those of one request: others begin with plain decoding"
    )
    assert first.job.session.stats.drafted <= before + 9
    assert all(ticket.job.session.stats.drafted == 0 for ticket in others)
    turn_until(it, lambda: it.running == 1)
    it.turn()
    assert limits(it) == [UNLIMITED]


def test_acceptance_forgets_slowly():
    rate = Acceptance()
    assert rate.rate == Acceptance.USUAL
    for _ in range(1000):
        rate.learn(10, 9)
    assert 0.88 < rate.rate < 0.91
    for _ in range(1000):
        rate.learn(10, 1)
    assert rate.rate < 0.12


def test_long_prompts_with_short_answers_are_not_drafted_for():
    it = scheduler(BatchCosts({1: 0.01, 101: 5.01}, {1: 1.0, 64: 1.2}), slots=2)

    def ask(times: int, prompt: list[int], max_tokens: int, strategy: Strategy = VANILLA) -> None:
        for _ in range(times):
            it.submit(
                Ticket(
                    prompt,
                    Sampling(max_tokens=max_tokens),
                    TextStream(letters),
                    lambda event: None,
                    strategy=strategy,
                )
            )

    ask(2, [1, 2], 40)
    it.turn()
    assert min(limits(it)) > 0
    turn_until_idle(it)
    ask(60, [1, 2] * 40, 1, RatedPrompt())
    ask(60, [1, 2] * 40, 1, build_strategy("prompt_lookup"))
    ask(2, [1, 2], 40)
    turn_until_idle(it)
    assert it.load.prompts.rate < 1, "no draft reads for the others"
    ask(2, [1, 2] * 40, 40)
    it.turn()
    it.turn()
    assert it.load.prompts.rate < 1, "what is not answered yet says nothing"
    ask(60, [1, 2] * 40, 1)
    turn_until_idle(it)
    ask(2, [1, 2], 40)
    it.turn()
    assert it.load.prompts.rate > 5
    assert limits(it) == [0, 0]


def test_models_take_all_cores_while_nobody_overlaps_under_load():
    pearl = build_strategy("pearl", {}, table_resources(8))
    it = scheduler(COMPUTE_BOUND, strategy=pearl)
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


def test_a_new_request_is_limited_from_its_first_round():
    it = scheduler(COMPUTE_BOUND, strategy=build_strategy("pearl", {}, table_resources(8)))
    tickets = [submit(it, 30)[0] for _ in range(8)]
    it._drop()
    it._admit()
    assert [t.job.session.draft_limit for t in tickets[4:]] == [0] * 4, (
        "an overlap would begin with the prompt"
    )
    turn_until_idle(it)


LIMITED = BatchCosts({1: 0.5}, {1: 1.0, 8: 1.0, 64: 8.0})
"""Two requests draft at most as many tokens as is best, which is fewer than they would alone."""


@pytest.mark.parametrize(
    ("name", "settings", "deterministic"),
    [
        ("vanilla_sd", {"temperature": 1.0, "seed": 5, "repeatable": True}, False),
        ("vanilla_sd", {"temperature": 1.0, "seed": 5, "repeatable": True}, True),
        ("lossy_sd", {"repeatable": True}, False),
        ("lossy_sd", {}, True),
    ],
)
@pytest.mark.parametrize("costs", [COMPUTE_BOUND, LIMITED])
def test_an_answer_that_is_to_be_the_same_does_not_depend_on_other_requests(
    name, settings, deterministic, costs
):
    strategy = build_strategy(name, {}, replace(table_resources(8), deterministic=deterministic))
    sampling, texts = Sampling(max_tokens=60, **settings), []
    for others in (0, 7):
        it = scheduler(costs, strategy=strategy, noise=2.0)
        for _ in range(others):
            submit(it, 40, strategy=VANILLA)
        events: list[Event] = []
        it.submit(Ticket([1, 2], sampling, TextStream(letters), events.append))
        turn_until_idle(it)
        assert isinstance(events[-1], End)
        texts.append("".join(e.text for e in events if isinstance(e, Delta)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_seeded_request_that_named_an_exact_strategy_drafts_whoever_else_is_there(deterministic):
    """Others with a seed are not sent to such a strategy at all (http/service.py)."""
    strategy = build_strategy(
        "vanilla_sd", {}, replace(table_resources(8), deterministic=deterministic)
    )
    asked = Sampling(max_tokens=40, temperature=1.0, seed=5, repeatable=True)
    for others in (0, 7):
        it = scheduler(COMPUTE_BOUND, strategy=strategy)  # where eight without a seed do not draft
        for _ in range(others):
            submit(it, 20)
        ticket = Ticket([1, 2], asked, TextStream(letters), [].append)
        it.submit(ticket)
        turn_until_idle(it)
        assert max(ticket.job.session.stats.judged_at) == 4, "the last of its five draft tokens"
    it = scheduler(COMPUTE_BOUND, strategy=strategy)
    ticket = Ticket([1, 2], replace(asked, repeatable=False), TextStream(letters), [].append)
    it.submit(ticket)
    turn_until_idle(it)
    assert ticket.job.session.stats.drafted > 0, "a request without a seed drafts when it is alone"
    for _ in range(8):
        it.submit(Ticket([1, 2], replace(asked, repeatable=False), TextStream(letters), [].append))
    it.turn()
    assert limits(it) == [0] * 8, (
        "also with --deterministic: its seed is a random one, and repeats nothing"
    )


@pytest.mark.parametrize(
    ("name", "temperature", "probed"),
    [("vanilla_sd", 0.0, True), ("vanilla_sd", 1.0, False), ("lossy_sd", 0.0, False)],
)
def test_a_recorded_request_is_probed_only_where_that_changes_no_answer(
    name, temperature, probed, monkeypatch
):
    monkeypatch.setattr(draft_length, "ENOUGH", 10**6)  # no other length is tried
    it = scheduler(COMPUTE_BOUND, strategy=build_strategy(name, {}, table_resources(8)))
    it.strategy.resources = replace(it.strategy.resources, deterministic=False)
    tickets = []
    for _ in range(8):
        ticket = Ticket(
            [1, 2],
            Sampling(max_tokens=200, temperature=temperature),
            TextStream(letters),
            lambda event: None,
        )
        it.submit(ticket)
        tickets.append(ticket)
    it.turn()
    tickets[3].job.session.recorded = True
    probes = []
    for _ in range(PROBE_EVERY):
        it.turn()
        probes.append(limits(it))
    assert [max(of) for of in zip(*probes, strict=True)] == [0, 0, 0, int(probed), 0, 0, 0, 0]


def test_a_seed_in_a_request_asks_for_the_same_answer():
    for body, repeatable in (({"seed": 3}, True), ({"seed": 0}, True), ({}, False)):
        settings = CompletionRequest(model="pair", prompt="hello", **body).sampling_settings()
        assert Sampling(**settings).repeatable == repeatable
