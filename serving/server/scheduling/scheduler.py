"""The scheduler: one thread owns the engine and steps it; requests arrive through a queue, text
leaves through callbacks.

Each round drops requests that were cancelled or are past their deadline, fills free slots from the
queue (admission.py), runs one engine step for all running requests, and delivers what became final.
Nothing here depends on HTTP or asyncio: `Ticket.deliver` is called on the scheduler's thread and
must not block. Every ticket gets `Delta`s and then exactly one `End`, `Failure` or `Cancelled`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from draftwell.serving.errors import DeviceLost
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.strategies import Strategy
from draftwell.serving.server.scheduling.admission import FairQueue, QueueFull, ServiceRate
from draftwell.serving.server.scheduling.draft_limits import (
    PROBE_EVERY,
    draft_limit,
    limit_drafts,
)
from draftwell.serving.server.scheduling.observer import Observer, Observers
from draftwell.serving.server.scheduling.ticket import (
    CANCELLED,
    Cancelled,
    DeadlineExceeded,
    Delta,
    End,
    Event,
    Failure,
    SchedulerClosed,
    Ticket,
    TicketGroup,
)
from draftwell.serving.server.settings import QUEUE, PromptSharing

log = logging.getLogger(__name__)

STALL_SECONDS = 4.0
"""How much longer than twice what rounds usually take here one may take before new requests are
sent elsewhere."""
HUNG_SECONDS = 300.0
"""Longest round, without prompts, also on a machine that others keep busy."""
TOKEN_SECONDS = 0.5
"""What each token of a prompt that its step reads adds to that: a large model on few cores reads a
few tokens a second."""
MOST_PROMPT_SECONDS = 600.0
"""What all of them add at most where prompts of late took less: an idle server's step reads
thousands, and a device that hangs meanwhile must be noticed all the same."""
FORGET = 0.9
"""What a round leaves of what earlier ones took longer than it."""
ABORT_SECONDS = 1.0
"""How long the round that runs when a scheduler is aborted may take to end."""


class Scheduler:
    """Runs tickets over an engine.

    Args:
        strategy: decodes tickets without one.
        slots: requests that run at once; the engine's models must have as many.
        threads: compute threads of the scheduler's thread; None: PyTorch's choice, and what the
            engine's governor makes of it.
        capacity: requests that may wait for a slot.
        observers: notified of every ticket (observer.py).
        prompt_sharing: whose prompts and answers a request need not read again: those of tickets of
            the same owner (tenant), of tickets that were submitted together (request), or nobody's
            (off).
    """

    def __init__(
        self,
        engine: Engine,
        strategy: Strategy,
        slots: int,
        *,
        threads: int | None = None,
        capacity: int = QUEUE,
        observers: Sequence[Observer] = (),
        prompt_sharing: PromptSharing = "tenant",
    ):
        self.engine, self.strategy, self.slots = engine, strategy, slots
        self._threads, self._prompt_sharing = threads, prompt_sharing
        self._observers = Observers(observers)
        self._rate = ServiceRate()
        # guards the queue, the displaced tickets and `_closing`
        self._changed = threading.Condition()
        self._queue = FairQueue(capacity)
        self._displaced: list[Ticket] = []
        self._running: list[Ticket] = []
        self._admitting: list[Ticket] = []  # at most one, on its way from the queue to a slot
        self._rounds = 0
        self._closing = False
        self._aborting = False
        self._round_began: float | None = None
        # of late: the slowest round without prompts, and by token of prompts where it reads some
        self._round_seconds, self._token_seconds = 0.0, TOKEN_SECONDS
        self._thread = threading.Thread(target=self._run, name="draftwell-scheduler", daemon=True)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def threads(self) -> int:
        """Compute threads in force."""
        return (
            self.engine.governor.threads
            if self.engine.governor
            else self._threads or torch.get_num_threads()
        )

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def busy_seconds(self) -> float:
        """Seconds since the round that runs began; 0 between two rounds."""
        began = self._round_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def stalled(self) -> bool:
        """Whether a round takes much longer than others did: a device that is stuck, perhaps for a
        moment only."""
        usual = self._round_seconds + self._token_seconds * self.engine.reading
        return self.busy_seconds > STALL_SECONDS + 2 * usual

    @property
    def hung(self) -> bool:
        """Whether a round has taken so long that it will hardly end: a device or a lock that does
        not answer."""
        reading = self.engine.reading
        prompts = min(TOKEN_SECONDS * reading, MOST_PROMPT_SECONDS)
        return self.busy_seconds > HUNG_SECONDS + max(prompts, 2 * self._token_seconds * reading)

    @property
    def accepts(self) -> bool:
        """Whether new requests are accepted."""
        return self.alive and not self._closing

    @property
    def device_lost(self) -> DeviceLost | None:
        """The error of a device that has failed for good: this process answers nothing any more."""
        return self.engine.device_lost

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, *tickets: Ticket, urgent: bool = False) -> None:
        """Queue the tickets of one client's request, all or none, from any thread.

        Args:
            urgent: queue before all others, even if the queue is full (for the server's own
                checks).
        Raises:
            SchedulerClosed: the server is shutting down.
            QueueFull: too many requests already wait.
        """
        now, together = time.monotonic(), TicketGroup()
        for ticket in tickets:
            ticket.arrived, ticket.together = now, together
        with self._changed:
            if self._closing:
                raise SchedulerClosed("the server is shutting down")
            if not urgent:
                self._make_room(tickets)
            for ticket in tickets:
                self._queue.put(ticket, first=urgent)
            self._changed.notify()

    def check_room(self, client: str, count: int, before: int = 0) -> None:
        """Raise what `submit` would raise if so many tickets of a client came now; from any
        thread.

        Args:
            before: tickets of that client's other requests which are still to come.
        """
        with self._changed:
            if self._closing:
                raise SchedulerClosed("the server is shutting down")
            if before and before + count > self._queue.capacity + self.slots:
                raise self._refusal()
            self._to_displace(client, before + count)

    def _make_room(self, tickets: Sequence[Ticket]) -> None:
        """Make room for tickets on slots or in the queue, by displacing others if that is fair;
        else raise QueueFull."""
        displaced = self._to_displace(tickets[0].client, len(tickets))
        for ticket in displaced:
            self._queue.remove(ticket)
        self._displaced += displaced

    def _to_displace(self, client: str, count: int) -> list[Ticket]:
        """Who has to leave the queue for so many tickets of a client; QueueFull if that would not
        be fair."""
        # one on its way is in neither list for a moment
        taken = len({id(ticket) for ticket in (*self._admitting, *self._running)})
        room = self._queue.capacity + max(0, self.slots - taken)
        # more than ever fit are accepted when the server is idle
        wanted = min(count, self._queue.capacity + self.slots)
        missing = len(self._queue) + wanted - room
        if missing <= 0:
            return []
        displaced = self._queue.to_displace(client, count, missing)
        if not displaced:
            raise self._refusal()
        return displaced

    def stop_taking(self) -> None:
        """Accept no new request; accepted ones continue. From any thread, never from a signal
        handler."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def abort(self, event: Failure | Cancelled = CANCELLED) -> None:
        """Accept no new request and end the others, from any thread, without waiting: `event` is
        delivered even while a pass hangs; slots are freed when the round ends."""
        self.stop_taking()
        self._aborting = True
        with self._changed:
            tickets = [*self._queue, *self._displaced, *self._admitting, *self._running]
        for ticket in tickets:
            ticket.give_up(event)

    def close(self, timeout: float | None = None) -> bool:
        """Accept no new request, finish the others and end the thread; after `timeout` seconds
        cancel what is left.

        Returns:
            False if the thread runs on: a round that does not end.
        """
        self.stop_taking()
        if self.alive:
            self._thread.join(timeout)
            self.abort()
            self._thread.join(ABORT_SECONDS)
        return not self.alive

    def turn(self, *, block: bool = False) -> None:
        """One round: drop, admit, step, publish.

        Args:
            block: wait for a request if there is none.
        """
        if block:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or self._running or self._queue or self._displaced
                )
        with self._timed():
            self._round()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Work whose end is watched (`stalled`, `hung`), and what it tells about the next."""
        self._round_began = time.monotonic()
        try:
            yield
        finally:
            took, reading = self.busy_seconds, self.engine.reading
            self._rate.worked(took)
            if reading:
                slowest = max(took / reading, FORGET * self._token_seconds)
                self._token_seconds = min(TOKEN_SECONDS, slowest)
            else:
                self._round_seconds = max(took, FORGET * self._round_seconds)
            self._round_began = None
            self.engine.reading = 0  # what the round read gave it longer until now

    def _round(self) -> None:
        self._drop()
        self._admit()
        if not self._running:
            return
        running = list(self._running)
        self._rounds += 1
        sessions = [
            (ticket.job.session, ticket.strategy)
            for ticket in running
            if ticket.job and ticket.strategy
        ]
        limit_drafts(self.engine, sessions, probe=self._rounds % PROBE_EVERY == 0)
        started = time.perf_counter()
        self.engine.step()
        self._observers.notify("stepped", len(running), self.waiting, time.perf_counter() - started)
        for ticket in running:
            self._publish(ticket)

    def _run(self) -> None:
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            while (
                not self._closing or self._running or self._queue or self._displaced
            ) and not self.device_lost:
                try:
                    self.turn(block=True)
                except Exception as error:
                    log.exception("a round failed")
                    self._fail_all(error)
        finally:  # whatever ended the thread, no request waits forever
            self.stop_taking()
            self._fail_all(self.device_lost or SchedulerClosed("the server has stopped working"))

    def _refusal(self) -> QueueFull:
        return QueueFull(self._rate.seconds_for(len(self._queue)))

    def _drop(self) -> None:
        """Drop tickets that were cancelled, displaced or are past their deadline."""
        now = time.monotonic()
        with self._changed:
            waiting, displaced, self._displaced = list(self._queue), self._displaced, []
        for ticket in displaced:
            self._leave(ticket, Failure(self._refusal()))
        for ticket in (*waiting, *self._running):
            # before `cancelled`: whoever waits for a late one has cancelled it by now
            if ticket.deadline is not None and now >= ticket.deadline:
                self._leave(
                    ticket,
                    Failure(DeadlineExceeded("the request was not answered before its deadline")),
                )
            elif ticket.cancelled or self._aborting:
                self._leave(ticket, CANCELLED)

    def _admit(self) -> None:
        while len(self._running) < self.slots:
            with self._changed:
                if not self._queue:
                    return
                ticket = self._queue.pop()
                self._admitting = [ticket]
                ticket.together.started = True
            ticket.strategy = ticket.strategy or self.strategy
            try:
                limit = draft_limit(ticket.strategy, ticket.sampling, len(self._running) + 1)
                ticket.job = self.engine.submit(
                    ticket.prompt, ticket.sampling, ticket.strategy, limit, self._owner(ticket)
                )
            except Exception as error:
                self._leave(ticket, Failure(error))
            else:
                ticket.admitted_at = time.monotonic()
                self._running.append(ticket)
                self._observers.notify("admitted", ticket)
            finally:
                self._admitting = []

    def _owner(self, ticket: Ticket) -> Hashable:
        """Whose prompts and answers a ticket need not read again (`Engine.submit`); the server's
        own checks read all."""
        if ticket.own or self._prompt_sharing == "off":
            return None
        return ticket.owner if self._prompt_sharing == "tenant" else ticket.together

    def _publish(self, ticket: Ticket) -> None:
        job = ticket.job
        assert job is not None
        known = ticket.text.tokens
        try:
            text = ticket.text.push(job.new_tokens())
            stopped = ticket.text.stopped
            if job.finished and not job.error and not stopped:
                text += ticket.text.flush()
                stopped = ticket.text.stopped  # the last piece may complete a stop string
            tokens = ticket.text.take()
            if text or tokens:
                ticket.deliver(Delta(text, tokens))
        except Exception as error:
            self._leave(ticket, Failure(error))
            return
        if ticket.text.tokens > known:
            ticket.first_token_at = ticket.first_token_at or time.monotonic()
            self._observers.notify("progressed", ticket, ticket.text.tokens - known)
        if stopped:
            self._leave(ticket, End("stop", ticket.text.tokens, job.session.stats))
        elif job.error:
            self._leave(ticket, Failure(job.error))
        elif job.finished:
            reason = job.session.text.finish_reason or "stop"
            self._leave(ticket, End(reason, ticket.text.tokens, job.session.stats))

    def _leave(self, ticket: Ticket, event: Event) -> None:
        """Take a ticket out, free its slot and deliver its last event; does nothing if it has
        already ended."""
        # it was displaced after it had been found cancelled or late
        if ticket.ended_at is not None:
            return
        if ticket in self._running:
            self._running.remove(ticket)
            self._rate.served()
        else:
            with self._changed:
                if ticket in self._queue:
                    self._queue.remove(ticket)
        try:
            if ticket.job is not None:
                self.engine.cancel(ticket.job)
        except Exception:  # the ticket still gets its last event, and the others continue
            log.exception("a slot could not be freed")
        ticket.ended_at = time.monotonic()
        try:
            ticket.deliver(event)
        except Exception:
            log.exception("an event could not be delivered")
        self._observers.notify("finished", ticket, event)

    def _fail_all(self, error: Exception) -> None:
        """End all tickets; what the slots of those that ran hold is not taken over, since nobody
        knows how far the failed step came."""
        with self._changed:
            waiting, displaced, self._displaced = list(self._queue), self._displaced, []
        with self._timed():
            for ticket in self._running:
                if ticket.job is not None:
                    ticket.job.session.forget()
            for ticket in (*waiting, *displaced, *self._running):
                self._leave(ticket, Failure(error))
