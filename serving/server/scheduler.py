"""The scheduler: one thread owns the engine and steps it; requests come in by a queue, text goes out by callbacks.

Each turn takes new requests, drops cancelled ones, fills free slots in order of arrival, runs one engine step for all
that run, and hands out what became final. Nothing here knows of HTTP or asyncio: `Ticket.deliver` is called on the
scheduler's thread and must not block. Every ticket gets `Delta`s and then exactly one `End`, `Failure` or `Cancelled`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.runtime.engine import Engine, Job
from serving.runtime.stats import Stats
from serving.runtime.strategies import Strategy
from serving.runtime.types import FinishReason, Sampling
from serving.server.detokenize import TextStream

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delta:
    """Text that is final."""

    text: str


@dataclass(frozen=True)
class End:
    """The answer is complete.

    Args:
        completion_tokens: tokens up to the last one that was used, stop token included.
        stats: the engine's counters; they may cover a few tokens behind a stop string.
    """

    finish_reason: FinishReason
    completion_tokens: int
    stats: Stats


@dataclass(frozen=True)
class Failure:
    """The request ended in an error of its own."""

    error: Exception


@dataclass(frozen=True)
class Cancelled:
    """The request was dropped: its client went away, or the server is going down."""


Event = Delta | End | Failure | Cancelled


class SchedulerClosed(Exception):
    """The server is going down and takes no new request."""


class Ticket:
    """One request on its way through the scheduler.

    Args:
        prompt: token ids.
        text: turns the request's tokens into text.
        deliver: receives the events, on the scheduler's thread.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, text: TextStream, deliver: Callable[[Event], None]):
        self.prompt, self.sampling, self.text, self.deliver = prompt, sampling, text, deliver
        self.cancelled = False
        self.job: Job | None = None

    def cancel(self) -> None:
        """Give the request up, from any thread; its slot is free before the next round."""
        self.cancelled = True


class Scheduler:
    """Runs tickets over an engine.

    Args:
        slots: requests that run at once; the engine's models must have as many.
        threads: compute threads of the scheduler's thread; None leaves torch's own choice.
    """

    def __init__(self, engine: Engine, strategy: Strategy, slots: int, *, threads: int | None = None):
        self.engine, self.strategy, self.slots = engine, strategy, slots
        self._threads = threads
        self._inbox: queue.Queue[Ticket | None] = queue.Queue()  # None only wakes the thread
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._gate = threading.Lock()  # a ticket is either refused or in the inbox before closing is seen
        self._closing = False
        self._aborting = False
        self._thread = threading.Thread(target=self._run, name="draftwell-scheduler", daemon=True)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting) + self._inbox.qsize()

    @property
    def accepts(self) -> bool:
        """Whether new requests are taken and worked on."""
        return self._thread.is_alive() and not self._closing

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket, from any thread; raises SchedulerClosed when the server is going down."""
        with self._gate:
            if self._closing:
                raise SchedulerClosed("the server is shutting down")
            self._inbox.put(ticket)

    def close(self, timeout: float | None = None) -> None:
        """Take no new request, finish those that are here, end the thread; after `timeout` seconds cancel what is left."""
        with self._gate:
            self._closing = True
        if not self._thread.is_alive():
            return
        self._inbox.put(None)
        self._thread.join(timeout)
        self._aborting = True
        self._thread.join()

    def turn(self, *, block: bool = False) -> None:
        """One round: take, drop, admit, step, publish.

        Args:
            block: wait for a request when there is nothing to do.
        """
        self._take(block=block and not self._waiting and not self._running)
        self._drop_cancelled()
        self._admit()
        if self._running:
            self.engine.step()
            for ticket in list(self._running):
                self._publish(ticket)

    def _run(self) -> None:
        if self._threads:
            import torch

            torch.set_num_threads(self._threads)
        while not self._closing or self._waiting or self._running or not self._inbox.empty():
            try:
                self.turn(block=not self._closing)
            except Exception as error:
                log.exception("a round failed")
                self._fail_all(error)

    def _take(self, *, block: bool) -> None:
        try:
            while True:
                ticket = self._inbox.get(block=block)
                block = False
                if ticket is not None:
                    self._waiting.append(ticket)
        except queue.Empty:
            return

    def _drop_cancelled(self) -> None:
        for ticket in [t for t in (*self._waiting, *self._running) if t.cancelled or self._aborting]:
            self._leave(ticket, Cancelled())

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            ticket = self._waiting[0]
            try:
                ticket.job = self.engine.submit(ticket.prompt, ticket.sampling, self.strategy)
            except Exception as error:
                self._leave(ticket, Failure(error))
                continue
            self._running.append(self._waiting.popleft())

    def _publish(self, ticket: Ticket) -> None:
        job = ticket.job
        assert job is not None
        try:
            text = ticket.text.push(job.new_tokens())
            stopped = ticket.text.stopped
            if job.finished and not job.error and not stopped:
                text += ticket.text.flush()
                stopped = ticket.text.stopped  # the last piece may complete a stop string
            if text:
                ticket.deliver(Delta(text))
        except Exception as error:
            self._leave(ticket, Failure(error))
            return
        if stopped:
            self.engine.cancel(job)
            self._leave(ticket, End("stop", ticket.text.tokens, job.session.stats))
        elif job.error:
            self._leave(ticket, Failure(job.error))
        elif job.finished:
            reason = job.session.text.finish_reason or "stop"
            self._leave(ticket, End(reason, ticket.text.tokens, job.session.stats))

    def _leave(self, ticket: Ticket, event: Event) -> None:
        """Take a ticket out, free its slot, and tell it how it ended."""
        if ticket in self._running:
            self._running.remove(ticket)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        if ticket.job is not None:
            self.engine.cancel(ticket.job)
        try:
            ticket.deliver(event)
        except Exception:
            log.exception("an event could not be delivered")

    def _fail_all(self, error: Exception) -> None:
        for ticket in [*self._waiting, *self._running]:
            self._leave(ticket, Failure(error))
