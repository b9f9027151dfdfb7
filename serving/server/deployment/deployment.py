"""A served model with its scheduler and its HTTP service, and the check that it answers before it
takes over."""

from __future__ import annotations

import threading
import time

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import Strategy
from draftwell.serving.server.http.service import Service
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import (
    DeadlineExceeded,
    Delta,
    End,
    Event,
    Failure,
    Ticket,
)
from draftwell.serving.temperature import SERVED_TEMPERATURE

CHECK_SECONDS = 60.0
"""Long, because the check's request may have to wait for slots."""


class NoAnswerInTime(DraftwellError):
    """The new model did not answer in time. The server may have been busy: try again."""

    code = "no_answer_in_time"


class Deployment:
    """A served model with the scheduler and the service that answer for it."""

    def __init__(self, served: ServedModel, scheduler: Scheduler):
        self.served, self.scheduler = served, scheduler
        self.service = Service(served, scheduler)

    def check(self, timeout: float = CHECK_SECONDS) -> None:
        """Send one short request through each tuned strategy. What they learn from it is discarded.

        Raises:
            NoAnswerInTime: no answer came in time.
            DraftwellError: the request failed (`new_model_fails`).
        """
        sampled = self.served.strategies.get(temperature=SERVED_TEMPERATURE)
        for strategy, temperature in {
            sampled: SERVED_TEMPERATURE,
            self.served.strategy: 0.0,
        }.items():
            self._rehearse(
                type(strategy)(strategy.config, strategy.resources.private()), temperature, timeout
            )

    def _rehearse(self, strategy: Strategy, temperature: float, timeout: float) -> None:
        over = threading.Event()
        ends: list[Event] = []

        def deliver(event: Event) -> None:
            ends.append(event)
            if not isinstance(event, Delta):
                over.set()

        sampling = self.served.pair.sampling(max_tokens=8, temperature=temperature)
        ticket = Ticket(
            self.served.encode("Hello"),
            sampling,
            TextStream(self.served.decode),
            deliver,
            deadline=time.monotonic() + timeout,
            strategy=strategy,
        )
        ticket.own = True
        self.scheduler.submit(ticket, urgent=True)
        answered = over.wait(timeout + 5)
        if not answered or not isinstance(ends[-1], End):
            ticket.cancel()
            failed = ends[-1].error if ends and isinstance(ends[-1], Failure) else "no answer"
            late = not answered or isinstance(failed, DeadlineExceeded)
            if late:
                raise NoAnswerInTime(f"the new model does not answer ({failed})")
            raise DraftwellError(
                f"the new model does not answer ({failed})", code="new_model_fails"
            )
