"""The tickets of one HTTP request, on the event loop: submitted together, read as events arrive,
cancelled together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from draftwell.serving.errors import ContextTooLong, DeviceLost, InvalidRequest, OutOfMemory
from draftwell.serving.runtime.logits import Rating
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import Strategy
from draftwell.serving.server.http.errors import (
    NO_RETRY,
    APIError,
    deadline_exceeded,
    internal_error,
    queue_full,
    retry_after,
    shutting_down,
    without_paths,
)
from draftwell.serving.server.scheduling.admission import QueueFull
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import (
    Cancelled,
    DeadlineExceeded,
    Delta,
    End,
    Event,
    Failure,
    SchedulerClosed,
    Ticket,
)

CLIENT_CLOSED_REQUEST = 499
RESTART_SECONDS = 20


@dataclass(frozen=True)
class Deadline:
    """A request's.

    Args:
        at: `time.monotonic` seconds, None for none.
        own: the client set it; exceeding it is then not the server's error.
    """

    at: float | None = None
    own: bool = False

    @classmethod
    def of(cls, asked: float | None, limit: float | None) -> Deadline:
        """The earlier one of what a client and a server set, from now on.

        Args:
            asked, limit: seconds; None: no limit.
        """
        limits = [seconds for seconds in (asked, limit) if seconds]
        return cls(time.monotonic() + min(limits), asked == min(limits)) if limits else cls()

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """End what is awaited within when the time is over.

        Raises:
            APIError: it is, as for a request that waits for a slot.
        """
        try:
            async with asyncio.timeout(
                None if self.at is None else self.at - time.monotonic()
            ) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise deadline_exceeded(own=self.own) from error


@dataclass
class AnswerChoice:
    """One answer to one prompt.

    Args:
        index: place among the request's choices.
        before: the prompt's text if it is echoed.
        body: `messages` or `prompt` as the client sent them.
        shows: whether it shows generated tokens; False if only the prompt is wanted.
        listed_characters: of the tokens whose log-probs are listed so far.
        end: the last event of its ticket.
    """

    index: int
    prompt: Sequence[int]
    sampling: Sampling
    text: TextStream
    strategy: Strategy
    before: str = ""
    shows: bool = True
    listed_characters: int = 0
    body: Mapping[str, Any] | None = None
    ticket: Ticket = field(init=False)
    end: End | None = None

    @property
    def stats(self) -> Stats:
        if self.end is None and self.ticket.job:  # so far
            return self.ticket.job.session.stats
        return self.end.stats if self.end else Stats()

    @property
    def completion_tokens(self) -> int:
        return self.end.completion_tokens if self.end and self.shows else 0

    @property
    def prompt_ratings(self) -> list[Rating | None]:
        """Ratings of the prompt's tokens; complete when the first token is generated."""
        return self.ticket.job.session.prompt_ratings if self.ticket.job else []


class Conversation:
    """All choices of a request. `close` cancels those that still run; so does a disconnected
    client.

    Args:
        client: name by which the queue is fair between clients.
        owner, served: as in `Ticket`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        request: Request,
        choices: Sequence[AnswerChoice],
        *,
        deadline: Deadline,
        client: str,
        owner: tuple[str, str],
        served: object = None,
    ):
        self.choices = choices
        self._scheduler, self._request, self._deadline = scheduler, request, deadline
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._watcher: asyncio.Task[None] | None = None
        for choice in choices:
            choice.ticket = Ticket(
                choice.prompt,
                choice.sampling,
                choice.text,
                self._deliver_to(choice.index),
                client=client,
                deadline=deadline.at,
                strategy=choice.strategy,
                body=choice.body,
            )
            choice.ticket.owner, choice.ticket.served = owner, served

    def submit(self) -> None:
        """Queue all choices, or none.

        Raises:
            APIError: 429 if too many wait, 503 if the server is shutting down.
        """
        try:
            self._scheduler.submit(*(choice.ticket for choice in self.choices))
        except (QueueFull, SchedulerClosed) as error:
            self.close()
            raise self._error(Failure(error)) from error
        self._watcher = asyncio.create_task(self._cancel_when_gone())

    async def next(self, seconds: float | None = None) -> tuple[AnswerChoice, Delta | End] | None:
        """The next event of any choice; None if there is none for so many seconds.

        Raises:
            APIError: one of them failed, or the deadline is over, also where the scheduler does not
                answer; the others are cancelled.
        """
        try:
            async with self._deadline.enforced(), asyncio.timeout(seconds):
                index, event = await self._events.get()  # a timeout takes no event out of the queue
        except TimeoutError:
            return None
        except APIError:
            self.close()
            raise
        if isinstance(event, Failure | Cancelled):
            self.close()
            raise self._error(event)
        choice = self.choices[index]
        if isinstance(event, End):
            choice.end = event
        return choice, event

    @property
    def over(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.end for choice in self.choices)

    def close(self) -> None:
        """Cancel the choices that still run."""
        if self._watcher:
            self._watcher.cancel()
        for choice in self.choices:
            choice.ticket.cancel()

    def _deliver_to(self, index: int) -> Callable[[Event], None]:
        def deliver(event: Event) -> None:
            try:
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))
            except RuntimeError:  # the loop is closed: nobody reads events
                self.choices[index].ticket.cancel()

        return deliver

    async def _cancel_when_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        for choice in self.choices:
            choice.ticket.cancel()

    def _error(self, event: Failure | Cancelled) -> APIError:
        """The error that the client gets."""
        if isinstance(event, Cancelled):
            if self._scheduler.accepts:
                return APIError(CLIENT_CLOSED_REQUEST, "the client closed the request")
            return shutting_down()
        error = event.error
        if isinstance(error, QueueFull):
            return queue_full(str(error), error.retry_after_seconds)
        if isinstance(error, SchedulerClosed):
            return shutting_down()
        if isinstance(error, DeadlineExceeded):
            return deadline_exceeded(str(error), own=self._deadline.own)
        if isinstance(error, ContextTooLong):
            return APIError(400, without_paths(error), code="context_length_exceeded")
        if isinstance(error, InvalidRequest):
            code = None if error.code == InvalidRequest.code else error.code
            return APIError(400, without_paths(error), code=code)
        unexpected = internal_error(error)  # into the log
        if isinstance(error, DeviceLost):
            told = "the server's device has failed: it stops, to be started again"
            headers = retry_after(RESTART_SECONDS)
            return APIError(503, told, code=error.code, headers=headers)
        if isinstance(error, OutOfMemory):
            told = "the server is out of memory for this request: send a shorter one"
            return APIError(503, told, code="out_of_memory", headers=NO_RETRY)
        return unexpected
