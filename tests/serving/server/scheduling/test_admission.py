"""Who waits, who is next, who is refused; deadlines, cancellation of many, and what observers hear
of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st

from draftwell.serving.errors import ContextTooLong
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.engine.prompt_budget import PromptBudget
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.app import create_app
from draftwell.serving.server.scheduling.admission import FairQueue, QueueFull, ServiceRate
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import (
    Cancelled,
    DeadlineExceeded,
    Delta,
    End,
    Event,
    Failure,
    Ticket,
)
from tests.support.models.resources import table_pair, table_resources
from tests.support.models.table_model import TableModel
from tests.support.server.scheduler_rounds import letters, turn_until, turn_until_idle
from tests.support.server.served_pair import running, served_pair
from tests.support.server.server_process import wait_until

AUTOREGRESSIVE = build_strategy("autoregressive")


def ticket(client: str = "", max_tokens: int = 5, **settings: Any) -> tuple[Ticket, list[Event]]:
    events: list[Event] = []
    return Ticket(
        (1,),
        Sampling(max_tokens=max_tokens),
        TextStream(letters),
        events.append,
        client=client,
        **settings,
    ), events


def scheduler(slots: int = 1, capacity: int = 100, observers: Sequence[Observer] = ()) -> Scheduler:
    engine = Engine({"target": TableModel.random(vocab_size=4, seed=1, slots=slots)})
    return Scheduler(engine, AUTOREGRESSIVE, slots, capacity=capacity, observers=observers)


def free_slots(it: Scheduler) -> int:
    return len(it.engine.models["target"].slots._free)  # type: ignore[attr-defined]


def queued(*clients: str, capacity: int = 100) -> FairQueue:
    queue = FairQueue(capacity)
    for client in clients:
        queue.put(ticket(client)[0])
    return queue


def order(queue: FairQueue) -> str:
    return "".join(queue.pop().client for _ in range(len(queue)))


def test_clients_take_turns() -> None:
    assert order(queued(*"aaaabbc")) == "abcabaa"
    assert order(queued(*"aaa")) == "aaa"
    queue = queued(*"aaaa")
    queue.pop()
    queue.put(ticket("b")[0])
    assert order(queue) == "abaa", (
        "a client that comes later waits for one request of the other, not for all"
    )


@given(st.lists(st.one_of(st.sampled_from("abc"), st.none()), max_size=60), st.data())
def test_nobody_is_lost_and_nobody_is_passed_twice(
    steps: list[str | None], data: st.DataObject
) -> None:
    """Against a plain model: while a client waits, no other gets two turns before it gets one."""
    queue, inside, passed = FairQueue(10), [], dict.fromkeys("abc", "")
    for client in steps:
        if client is not None:
            inside.append(ticket(client)[0])
            queue.put(inside[-1])
        elif inside and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(inside))
            inside.remove(gone)
            queue.remove(gone)
        elif inside:
            one = queue.pop()
            assert one is next(t for t in inside if t.client == one.client), "first in, first out"
            inside.remove(one)
            for other in "abc":
                waits = any(t.client == other for t in inside)
                passed[other] = passed[other] + one.client if waits and other != one.client else ""
                assert len(passed[other]) == len(set(passed[other])), "twice before the other once"
        assert len(queue) == len(inside)
        assert set(map(id, queue)) == set(map(id, inside))


def test_an_empty_queue_and_a_stranger_are_errors() -> None:
    with pytest.raises(IndexError):
        FairQueue(1).pop()
    with pytest.raises(ValueError, match="not in deque"):
        queued("a").remove(ticket("a")[0])
    with pytest.raises(ValueError, match="at least one"):
        FairQueue(0)


def test_one_that_is_displaced_while_it_is_cancelled_ends_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another client comes between the look at the queue, which finds two cancelled, and their
    leaving."""
    heard: list[Ticket] = []

    class Ends(Observer):
        def finished(self, ticket: Ticket, event: Event) -> None:
            heard.append(ticket)

    it = scheduler(capacity=2, observers=[Ends()])
    mine = [ticket("a", max_tokens=3) for _ in range(3)]
    it.submit(mine[0][0])
    it.turn()
    for one, _ in mine[1:]:
        it.submit(one)
        one.cancel()
    other, other_events = ticket("b")
    leave, late = it._leave, iter([other])

    def slowly(one: Ticket, event: Event) -> None:
        for newcomer in late:
            it.submit(newcomer)
            assert it._displaced == [mine[2][0]], (
                "its place was taken meanwhile, or the test proves nothing"
            )
        leave(one, event)

    monkeypatch.setattr(it, "_leave", slowly)
    turn_until_idle(it)
    it.turn()
    for one, events in [*mine, (other, other_events)]:
        assert len([event for event in events if not isinstance(event, Delta)]) == 1, (
            "exactly one last event"
        )
        assert heard.count(one) == 1
    assert [type(events[-1]) for _, events in mine] == [End, Cancelled, Cancelled]
    assert isinstance(other_events[-1], End)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    it = scheduler(capacity=2)
    for _ in range(3):
        it.submit(ticket()[0])
    with pytest.raises(QueueFull) as caught:
        it.submit(ticket()[0])
    assert caught.value.retry_after_seconds == 1, "nothing is known yet"
    it.turn()
    assert (it.running, it.waiting) == (1, 2), "a free slot is room as well"
    with pytest.raises(QueueFull):
        it.submit(ticket()[0])
    turn_until_idle(it)


def test_retry_after_follows_the_service_rate() -> None:
    rate = ServiceRate()
    assert rate.seconds_for(1000) == 1
    for _ in range(10):
        rate.worked(2.0)
        rate.served()
    assert rate.seconds_for(1) == 2
    assert rate.seconds_for(10) == 20
    assert rate.seconds_for(0) == 1
    assert rate.seconds_for(10_000) == 60
    for _ in range(32):
        rate.worked(4.0)
        rate.served()
    assert rate.seconds_for(1) == 4, "the last 32 count"


def test_an_idle_hour_makes_no_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    it = scheduler(slots=1, capacity=1)
    it.submit(ticket(max_tokens=2)[0])
    turn_until_idle(it)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3600)
    for _ in range(2):
        it.submit(ticket()[0])
    with pytest.raises(QueueFull) as caught:
        it.submit(ticket()[0])
    assert caught.value.retry_after_seconds <= 2
    turn_until_idle(it)


def busy(capacity: int) -> Scheduler:
    """One slot, which is taken."""
    it = scheduler(capacity=capacity)
    it.submit(ticket("first", max_tokens=30)[0])
    it.turn()
    return it


def refused(events: list[Event]) -> bool:
    return (
        bool(events) and isinstance(events[-1], Failure) and isinstance(events[-1].error, QueueFull)
    )


def test_a_request_of_several_tickets_is_taken_whole_or_not_at_all() -> None:
    idle = scheduler(slots=2, capacity=1)
    idle.submit(*(ticket()[0] for _ in range(3)))
    with pytest.raises(QueueFull):
        idle.submit(ticket()[0])
    turn_until_idle(idle)
    # what never fits is taken when nobody else is here
    idle.submit(*(ticket()[0] for _ in range(9)))
    turn_until_idle(idle)
    it = busy(capacity=3)
    for _ in range(2):
        it.submit(ticket()[0])
    with pytest.raises(QueueFull):
        it.submit(ticket()[0], ticket()[0])
    assert it.waiting == 2
    turn_until_idle(it)


def test_a_request_makes_room_with_all_its_tickets() -> None:
    it = busy(capacity=4)
    alone, pair = [ticket("greedy") for _ in range(2)], [ticket("greedy") for _ in range(2)]
    for one, _ in alone:
        it.submit(one)
    it.submit(*(one for one, _ in pair))
    modest, events = ticket("modest")
    it.submit(modest)
    it.turn()
    assert [refused(log) for _, log in pair] == [True, True]
    assert it.waiting == 3, "and nobody else"
    turn_until_idle(it)
    assert all(isinstance(log[-1], End) for log in (events, *(log for _, log in alone)))


def test_a_request_that_has_started_is_not_displaced() -> None:
    it = scheduler(slots=1, capacity=3)
    greedy = [ticket("greedy") for _ in range(4)]
    it.submit(*(one for one, _ in greedy))
    it.turn()
    assert (it.running, it.waiting) == (1, 3)
    with pytest.raises(QueueFull):
        it.submit(ticket("modest")[0])
    turn_until_idle(it)
    assert all(isinstance(log[-1], End) for _, log in greedy)


def test_a_request_on_its_way_to_a_slot_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    it = scheduler(slots=1, capacity=1)
    tickets = [ticket(client) for client in ("first", "second")]
    for one, _ in tickets:
        it.submit(one)
    submit, refused = it.engine.submit, []

    def admit(*request: Any) -> Any:
        if not refused:
            with pytest.raises(QueueFull) as caught:
                it.submit(ticket("third")[0])
            refused.append(caught.value)
        return submit(*request)

    monkeypatch.setattr(it.engine, "submit", admit)
    turn_until_idle(it)
    assert refused
    assert all(isinstance(log[-1], End) for _, log in tickets)


def test_a_greedy_client_makes_room_for_another_but_not_for_itself() -> None:
    it = busy(capacity=4)
    greedy = [ticket("greedy") for _ in range(4)]
    for one, _ in greedy:
        it.submit(one)
    with pytest.raises(QueueFull):
        it.submit(ticket("greedy")[0])
    modest = [ticket("modest") for _ in range(2)]
    for one, _ in modest:
        it.submit(one)
    with pytest.raises(QueueFull):
        it.submit(ticket("modest")[0])  # they have as many now
    it.turn()
    assert [bool(events) for _, events in greedy[2:]] == [True, True], "the newest of them"
    for _, (event,) in greedy[2:]:
        assert isinstance(event, Failure)
        assert isinstance(event.error, QueueFull)
    turn_until_idle(it)
    assert all(isinstance(events[-1], End) for _, events in [*greedy[:2], *modest])


def test_the_servers_own_check_is_taken_even_when_the_queue_is_full_and_is_next() -> None:
    it = scheduler(capacity=4)
    others = [ticket(client) for client in "abcd"]
    for one, _ in others:
        it.submit(one)
    check, events = ticket("server", max_tokens=2)
    it.submit(check, urgent=True)
    turn_until(
        it, lambda: any(log for _, log in others) or (events and isinstance(events[-1], End))
    )
    assert not any(log for _, log in others), "it waits for nobody"
    turn_until_idle(it)
    assert all(isinstance(log[-1], End) for _, log in others)


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs() -> None:
    it = scheduler(slots=1)
    running, ran = ticket(max_tokens=400, deadline=time.monotonic() + 3600)
    waiting, waited = ticket(deadline=time.monotonic() + 3600)
    patient, served = ticket()
    for one in (running, waiting, patient):
        it.submit(one)
    it.turn()
    assert not waited
    running.deadline = waiting.deadline = time.monotonic()
    it.turn()
    for events in (ran, waited):
        assert isinstance(events[-1], Failure)
        assert isinstance(events[-1].error, DeadlineExceeded)
    assert patient.job is not None, "the slot is used in the same round"
    turn_until_idle(it)
    assert isinstance(served[-1], End)
    assert free_slots(it) == 1


def test_a_thread_that_sleeps_wakes_for_a_request_and_keeps_its_deadline() -> None:
    it = scheduler()
    it.start()
    late, events = ticket(max_tokens=500, deadline=time.monotonic())
    it.submit(late)
    it.close()
    assert isinstance(events[-1], Failure)
    assert isinstance(events[-1].error, DeadlineExceeded)


@pytest.mark.parametrize("strategy", ["vanilla_sd", "pearl", "duo_decoding"])
def test_many_that_go_away_at_once_leave_nothing_behind(strategy: str) -> None:
    """Sixty requests, running and waiting, of which every second one goes; also in the middle of an
    overlap."""
    it = Scheduler(Engine(table_pair(vocab=8)), build_strategy(strategy, {}, table_resources(8)), 8)
    results = [ticket(str(number % 3), max_tokens=12) for number in range(60)]
    for one, _ in results:
        it.submit(one)
    for number in range(0, 60, 2):
        if number % 3 == 0:
            it.turn()
        results[number][0].cancel()
    it.turn()
    assert all(type(events[-1]) in (Cancelled, End) for one, events in results if one.cancelled), (
        "within one round"
    )
    turn_until_idle(it)
    assert all(isinstance(events[-1], End) for one, events in results if not one.cancelled)
    assert sum(isinstance(events[-1], Cancelled) for _, events in results) >= 20
    assert all(sum(not isinstance(e, Delta) for e in events) == 1 for _, events in results)
    it.engine.close()
    assert {len(model.slots._free) for model in it.engine.models.values()} == {8}  # type: ignore[attr-defined]
    assert it.engine.jobs == []


def test_each_request_is_decoded_by_its_own_strategy() -> None:
    it = scheduler(slots=2)
    own = build_strategy("prompt_lookup")
    plain, _ = ticket()
    other, _ = ticket(strategy=own)
    for one in (plain, other):
        it.submit(one)
    turn_until_idle(it)
    assert (plain.strategy, other.strategy) == (AUTOREGRESSIVE, own)
    assert other.job is not None
    assert other.job.session.stats.target_calls <= 5


class Ear(Observer):
    """`odd` has what should not be: an observer's own exception would only be logged."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.odd: list[str] = []

    def admitted(self, ticket: Ticket) -> None:
        if ticket.job is None or ticket.strategy is None:
            self.odd.append("admitted without a job or a strategy")
        self.heard.append(("admitted", ticket))

    def stepped(self, running: int, waiting: int, seconds: float) -> None:
        if seconds < 0:
            self.odd.append(f"a step of {seconds} s")
        self.heard.append(("stepped", running, waiting))

    def progressed(self, ticket: Ticket, tokens: int) -> None:
        if tokens <= 0 or ticket.first_token_at is None:
            self.odd.append(f"progress of {tokens} tokens, the first at {ticket.first_token_at}")
        self.heard.append(("progressed", ticket, tokens))

    def finished(self, ticket: Ticket, event: Event) -> None:
        self.heard.append(("finished", ticket, type(event)))


def test_observers_hear_the_whole_life_of_a_ticket() -> None:
    ear = Ear()
    it = scheduler(observers=[ear])
    first, events = ticket(max_tokens=3)
    second, _ = ticket(max_tokens=400)
    for one in (first, second):
        it.submit(one)
    it.turn()
    assert ear.heard == [("admitted", first), ("stepped", 1, 1), ("progressed", first, 1)]
    second.cancel()
    turn_until_idle(it)
    assert [heard for heard in ear.heard if heard[0] == "finished"] == [
        ("finished", second, Cancelled),
        ("finished", first, End),
    ]
    assert sum(heard[2] for heard in ear.heard if heard[0] == "progressed") == 3
    assert ("admitted", second) not in ear.heard
    assert isinstance(events[-1], End)
    assert first.arrived <= first.admitted_at <= first.first_token_at <= first.ended_at  # type: ignore[operator]
    assert (second.admitted_at, second.first_token_at) == (None, None)
    assert second.ended_at is not None
    assert not ear.odd


def test_tokens_behind_a_stop_string_are_no_progress() -> None:
    ear = Ear()
    it = scheduler(observers=[ear])
    whole, events = ticket(max_tokens=12)
    it.submit(whole)
    turn_until_idle(it)
    text = "".join(e.text for e in events if isinstance(e, Delta))
    cut, _ = ticket(max_tokens=12)
    cut.text = TextStream(letters, [text[3:6]])
    ear.heard.clear()
    it.submit(cut)
    turn_until_idle(it)
    assert (
        sum(heard[2] for heard in ear.heard if heard[0] == "progressed")
        == text.index(text[3:6]) + 3
    )
    assert not ear.odd


def test_a_round_that_only_reads_a_prompt_is_no_progress() -> None:
    ear = Ear()
    it = scheduler(slots=2, observers=[ear])
    it.engine = Engine(it.engine.models, budget=PromptBudget(8))
    answered, _ = ticket(max_tokens=9)
    it.submit(answered)
    it.turn()
    reading, _ = ticket(max_tokens=1)
    reading.prompt = (1,) * 20
    it.submit(reading)
    it.turn()
    assert ("admitted", reading) in ear.heard
    assert (answered.first_token_at is None, reading.first_token_at) == (False, None)
    turn_until_idle(it)
    heard = [one for one in ear.heard if one[:2] == ("progressed", reading)]
    assert heard == [("progressed", reading, 1)]


def test_a_request_that_never_starts_is_finished_without_having_been_admitted() -> None:
    ear = Ear()
    it = scheduler(observers=[ear])
    long, events = ticket(max_tokens=10_000)
    it.submit(long)
    it.turn()
    assert isinstance(events[0], Failure)
    assert isinstance(events[0].error, ContextTooLong)
    assert ear.heard == [("finished", long, Failure)]


def test_an_observer_that_fails_hurts_nobody_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Observer):
        def progressed(self, ticket: Ticket, tokens: int) -> None:
            raise RuntimeError("no disk")

        def finished(self, ticket: Ticket, event: Event) -> None:
            raise ValueError("no disk either")

    ear = Ear()
    it = scheduler(observers=[Broken(), ear])
    one, events = ticket()
    it.submit(one)
    turn_until_idle(it)
    assert isinstance(events[-1], End)
    assert [heard[0] for heard in ear.heard].count("progressed") == 5, (
        "the others hear it all the same"
    )
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "Broken.progressed",
        "Broken.finished",
    ]


def test_a_full_server_answers_429_with_retry_after_and_serves_those_it_took() -> None:
    app = create_app(served_pair("autoregressive", slots=1), capacity=1, drain_seconds=10)
    it: Scheduler = app.state.deployments.current.scheduler
    step, go_on, statuses = it.engine.step, threading.Event(), []
    it.engine.step = lambda: (go_on.wait(60), step())  # type: ignore[method-assign,return-value]
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        asking = [
            threading.Thread(
                target=lambda: statuses.append(
                    client.post("/v1/completions", json=body).status_code
                )
            )
            for _ in range(2)
        ]
        for number, thread in enumerate(asking):
            thread.start()
            wait_until(
                lambda number=number: it.running and it.running + it.waiting > number,
                "the request arrives",
            )
        refused = client.post("/v1/completions", json=body)
        go_on.set()
        for thread in asking:
            thread.join(60)
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) >= 1
    assert "waiting" in refused.json()["error"]["message"]
    assert statuses == [200, 200]
