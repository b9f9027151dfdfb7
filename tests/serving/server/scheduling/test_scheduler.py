"""The scheduler, turned by hand: slots, order, cancellation, isolation, drain."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from draftwell.serving.errors import ContextTooLong
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.engine.prompt_budget import PromptBudget
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import (
    Cancelled,
    Delta,
    End,
    Event,
    Failure,
    SchedulerClosed,
    Ticket,
)
from tests.support.models.table_model import TableModel
from tests.support.server.scheduler_rounds import letters, turn_until_idle
from tests.support.server.server_process import wait_until

POISON = 3
AUTOREGRESSIVE = build_strategy("autoregressive")


class Fragile(TableModel):
    """A table model that breaks on prompts with one token."""

    def forward(self, rows: Sequence[Forward]) -> list[Span]:
        if any(row.prefill and POISON in row.tokens for row in rows):
            raise RuntimeError("poisoned")
        return super().forward(rows)


def scheduler(slots: int, model: type[TableModel] = TableModel) -> Scheduler:
    return Scheduler(
        Engine({"target": model.random(vocab_size=4, seed=1, slots=slots)}),
        AUTOREGRESSIVE,
        slots,
        threads=1,
    )


def ticket(
    prompt: Sequence[int] = (1,), max_tokens: int = 5, stop: Sequence[str] = (), **sampling: Any
) -> tuple[Ticket, list[Event]]:
    events: list[Event] = []
    return Ticket(
        prompt,
        Sampling(max_tokens=max_tokens, **sampling),
        TextStream(letters, stop),
        events.append,
    ), events


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def alone(prompt: Sequence[int], max_tokens: int) -> str:
    engine = Engine({"target": TableModel.random(vocab_size=4, seed=1)})
    return letters(engine.generate(prompt, Sampling(max_tokens=max_tokens), AUTOREGRESSIVE).output)


@contextmanager
def started(it: Scheduler) -> Iterator[Scheduler]:
    it.start()
    try:
        yield it
    finally:
        it.close(timeout=5)


def test_requests_beyond_the_slots_wait_and_are_served_in_order() -> None:
    it = scheduler(slots=2)
    order: list[int] = []
    results = []
    for number in range(5):
        one, events = ticket([number % 4], max_tokens=4)
        one.deliver = lambda event, n=number, log=events: (
            log.append(event),
            order.append(n) if isinstance(event, End) else None,
        )
        results.append(events)
        it.submit(one)
    it.turn()
    assert (it.running, it.waiting) == (2, 3)
    turn_until_idle(it)
    assert order == [0, 1, 2, 3, 4]
    assert [text_of(events) for events in results] == [alone([n % 4], 4) for n in range(5)]


def test_every_ticket_ends_with_exactly_one_final_event() -> None:
    it = scheduler(slots=1)
    one, events = ticket()
    it.submit(one)
    turn_until_idle(it)
    assert all(isinstance(event, Delta) for event in events[:-1])
    assert isinstance(events[-1], End)
    assert (events[-1].finish_reason, events[-1].completion_tokens) == ("length", 5)


def test_a_cancelled_request_frees_its_slot_before_the_next_round() -> None:
    it = scheduler(slots=1)
    long, events = ticket(max_tokens=400)
    short, other = ticket(max_tokens=2)
    it.submit(long)
    it.submit(short)
    it.turn()
    assert it.waiting == 1
    long.cancel()
    it.turn()
    assert isinstance(events[-1], Cancelled)
    assert short.job is not None, "the freed slot is used in the same round"
    turn_until_idle(it)
    assert isinstance(other[-1], End)


def test_a_waiting_request_can_be_cancelled() -> None:
    it = scheduler(slots=1)
    running, events = ticket(max_tokens=6)
    waiting, other = ticket()
    it.submit(running)
    it.submit(waiting)
    it.turn()
    waiting.cancel()
    turn_until_idle(it)
    assert [type(event) for event in other] == [Cancelled]
    assert isinstance(events[-1], End)


def test_a_stop_string_ends_the_request_at_once() -> None:
    whole = alone([1], 12)
    it = scheduler(slots=1)
    one, events = ticket(max_tokens=12, stop=[whole[3:6]])
    it.submit(one)
    turn_until_idle(it)
    expected = whole[: whole.index(whole[3:6])]
    assert text_of(events) == expected
    assert isinstance(events[-1], End)
    assert (events[-1].finish_reason, events[-1].completion_tokens) == ("stop", len(expected) + 3)
    assert one.job is not None
    assert one.job.finished
    assert len(one.job.output) == len(expected) + 3, "nothing is generated behind the stop string"


def test_a_request_that_fails_does_not_hurt_the_others() -> None:
    it = scheduler(slots=3, model=Fragile)
    good, events = ticket([1], max_tokens=6)
    bad, bad_events = ticket([POISON])
    long, long_events = ticket([1], max_tokens=10_000)
    for one in (good, bad, long):
        it.submit(one)
    turn_until_idle(it)
    assert text_of(events) == alone([1], 6)
    assert isinstance(events[-1], End)
    assert isinstance(bad_events[-1], Failure)
    assert str(bad_events[-1].error) == "poisoned"
    assert isinstance(long_events[-1], Failure)
    assert isinstance(long_events[-1].error, ContextTooLong)


def test_a_decoder_that_fails_ends_only_its_own_request() -> None:
    def broken(ids: Sequence[int]) -> str:
        raise ValueError("no such token")

    it = scheduler(slots=2)
    good, events = ticket()
    bad, bad_events = ticket()
    bad.text = TextStream(broken)
    it.submit(bad)
    it.submit(good)
    turn_until_idle(it)
    assert isinstance(bad_events[-1], Failure)
    assert isinstance(events[-1], End)


def test_a_failed_round_ends_its_requests_and_frees_their_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What these held is not taken over."""
    it = scheduler(slots=2)
    step = it.engine.step
    calls = iter([False, False, True])

    def broken_once() -> None:
        if next(calls, False):
            raise RuntimeError("engine fault")
        step()

    monkeypatch.setattr(it.engine, "step", broken_once)
    first, second = ticket([1, 2, 1, 2]), ticket([1, 2, 1, 2])
    it.submit(first[0])
    with started(it):
        wait_until(lambda: first[1] and isinstance(first[1][-1], Failure), "the first request ends")
        it.submit(second[0])
        wait_until(
            lambda: second[1] and isinstance(second[1][-1], End), "the second request is answered"
        )
        assert it.accepts
    assert text_of(first[1]), "it had begun"
    assert second[1][-1].stats.cached_tokens == 0
    assert text_of(second[1]) == alone([1, 2, 1, 2], 5)


def test_a_slot_that_cannot_be_freed_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = scheduler(slots=2)
    cancel, calls = it.engine.cancel, iter([True])

    def broken_once(job: Any) -> None:
        if next(calls, False):
            raise RuntimeError("cache fault")
        cancel(job)

    monkeypatch.setattr(it.engine, "cancel", broken_once)
    gone, other = ticket(max_tokens=400), ticket(max_tokens=6)
    it.submit(gone[0])
    it.submit(other[0])
    it.turn()
    gone[0].cancel()
    it.turn()
    assert isinstance(gone[1][-1], Cancelled)
    assert "a slot could not be freed" in caplog.text
    turn_until_idle(it)
    assert isinstance(other[1][-1], End)
    assert text_of(other[1]) == alone([1], 6)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_tells_everybody_and_takes_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fatal(BaseException):
        """What no handler catches."""

    def fatal() -> None:
        raise Fatal

    it = scheduler(slots=1)
    monkeypatch.setattr(it.engine, "step", fatal)
    tickets = [ticket() for _ in range(3)]
    for one, _ in tickets:
        it.submit(one)
    it.start()
    it._thread.join(60)
    assert not it.alive
    assert [type(events[-1]) for _, events in tickets] == [Failure] * 3
    with pytest.raises(SchedulerClosed):
        it.submit(ticket()[0])


def test_closing_finishes_what_runs_and_what_waits_and_refuses_the_rest() -> None:
    it = scheduler(slots=1)
    tickets = [ticket(max_tokens=4) for _ in range(3)]
    for one, _ in tickets:
        it.submit(one)
    it.start()
    it.close()
    assert [type(events[-1]) for _, events in tickets] == [End] * 3
    assert not it.accepts
    with pytest.raises(SchedulerClosed):
        it.submit(ticket()[0])


def test_closing_with_a_time_limit_cancels_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    it = scheduler(slots=1)
    step = it.engine.step
    # else all may be over before this thread has its turn
    monkeypatch.setattr(it.engine, "step", lambda: (time.sleep(0.002), step()))
    tickets = [ticket(max_tokens=500) for _ in range(4)]
    for one, _ in tickets:
        it.submit(one)
    it.start()
    it.close(timeout=0)
    ends = [type(events[-1]) for _, events in tickets]
    assert ends[-1] is Cancelled
    assert set(ends) <= {End, Cancelled}


def test_a_step_has_longer_for_the_prompt_tokens_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of its own pieces: a long prompt of which it reads a little at a time gives it no
    hours."""
    it = scheduler(slots=2)
    engine = it.engine = Engine(it.engine.models, budget=PromptBudget(8))
    read: list[int] = []
    monkeypatch.setattr(
        engine,
        "_fly",
        lambda flight, fly=engine._fly: (read.append(engine.reading), fly(flight))[1],
    )
    it.submit(ticket([1], max_tokens=100)[0])
    it.turn()
    it.submit(ticket([1, 2] * 100, max_tokens=2)[0])
    for _ in range(4):
        it.turn()
    assert read[1:] == [8] * 4
    assert engine.reading == 0
    it._token_seconds = 0.01  # as after some prompts
    began = time.monotonic()
    for seconds, reading, hung in (
        (299, 0, False),
        (301, 0, True),
        (301, 1000, False),
        (801, 1000, True),
        (801, 4096, False),
        (901, 4096, True),
    ):  # an idle server's step reads so many
        it._round_began, engine.reading = began - seconds, reading
        assert it.hung is hung


def test_a_request_on_its_way_to_a_slot_is_told_of_an_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = scheduler(1)
    one, events = ticket()
    admit, told = it.engine.submit, []

    def submit(*given: Any) -> Any:
        it.abort(Failure(RuntimeError("it hangs")))
        told.extend(events)
        return admit(*given)

    monkeypatch.setattr(it.engine, "submit", submit)
    it.submit(one)
    turn_until_idle(it)
    assert [type(event) for event in told] == [Failure]
    assert events == told
