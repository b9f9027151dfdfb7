"""One request on its way through the scheduler, and the events that it is answered with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwell.serving.runtime.engine.engine import Job
from draftwell.serving.runtime.requests import FinishReason, Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import Strategy
from draftwell.serving.server.scheduling.detokenize import TextStream, TokenInfo


@dataclass(frozen=True)
class Delta:
    """Text that is final.

    Args:
        tokens: those that became final with it; a token held back by a stop string may follow a
            little later.
    """

    text: str
    tokens: Sequence[TokenInfo] = ()


@dataclass(frozen=True)
class End:
    """The answer is complete.

    Args:
        completion_tokens: tokens up to the last one that was used, stop token included.
        stats: the engine's counters; they may include a few tokens after a stop string.
    """

    finish_reason: FinishReason
    completion_tokens: int
    stats: Stats


@dataclass(frozen=True)
class Failure:
    """The request failed; others are not affected."""

    error: Exception


@dataclass(frozen=True)
class Cancelled:
    """The request was cancelled: its client disconnected, or the server is shutting down."""


Event = Delta | End | Failure | Cancelled
CANCELLED = Cancelled()


class SchedulerClosed(Exception):
    """The server is shutting down and accepts no new request."""


class DeadlineExceeded(Exception):
    """The request was not answered before its deadline."""


@dataclass(eq=False)
class TicketGroup:
    """Shared by tickets that were submitted together.

    Args:
        started: one of them has left the queue for a slot.
    """

    started: bool = False


class Ticket:
    """One request on its way through the scheduler.

    Args:
        prompt: token ids.
        text: turns the request's tokens into text.
        deliver: receives the events, on the scheduler's thread (the last one of `give_up` on
            another).
        client: name by which the queue is fair between clients; "": unknown.
        deadline: `time.monotonic` seconds at which the request ends in Failure(DeadlineExceeded),
            waiting or running.
        strategy: what decodes it; None: the scheduler's, which is filled in at admission.
        body: `messages` or `prompt` as the client sent them, for observers; None if it was not
            kept.

    Tickets of the same `owner` need not read again what slots hold of each other's prompts and
    answers. `served` is the model that it was sent to. `own` is true of the server's own check,
    which no observer counts or records. `arrived`, `admitted_at`, `first_token_at` and `ended_at`
    are `time.monotonic` seconds, None until then.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        text: TextStream,
        deliver: Callable[[Event], None],
        *,
        client: str = "",
        deadline: float | None = None,
        strategy: Strategy | None = None,
        body: Mapping[str, Any] | None = None,
    ):
        self.prompt, self.sampling, self.text, self.deliver = prompt, sampling, text, deliver
        self.client, self.deadline, self.strategy, self.body = client, deadline, strategy, body
        self.own = False
        self.owner: tuple[str, str] = ("", "")
        self.served: object = None
        self.cancelled = False
        self.together = TicketGroup()
        self.job: Job | None = None
        self.arrived: float | None = None
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None

    def cancel(self) -> None:
        """Cancel the request, from any thread; its slot is free before the next round."""
        self.cancelled = True

    def give_up(self, event: Failure | Cancelled) -> None:
        """Deliver the last event now, from any thread; what the scheduler delivers later is
        dropped."""
        deliver, self.deliver = self.deliver, lambda event: None
        deliver(event)
