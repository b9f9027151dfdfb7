"""A served model with its scheduler and its HTTP service, and the check that it answers before it
takes over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from draftwell.serving.errors import ContextTooLong, DraftwellError
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy
from draftwell.serving.server.deployment.mirror import MirroredRequest
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

log = logging.getLogger(__name__)

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

    def check(
        self, mirrored: Sequence[MirroredRequest] = (), timeout: float = CHECK_SECONDS
    ) -> None:
        """Send one short request through each tuned strategy, then those that clients sent last.
        What strategies learn from them is discarded.

        Args:
            mirrored: as many as there is time for.
        Raises:
            NoAnswerInTime: one of the first requests was not answered in time.
            DraftwellError: a request failed (`new_model_fails`).
        """
        sampled = self.served.strategies.get(temperature=SERVED_TEMPERATURE)
        for strategy, temperature in {
            sampled: SERVED_TEMPERATURE,
            self.served.strategy: 0.0,
        }.items():
            sampling = self.served.pair.sampling(max_tokens=8, temperature=temperature)
            self._rehearse(self.served.encode("Hello"), sampling, strategy, timeout)
        until = time.monotonic() + timeout
        for request in mirrored:
            strategy = self.served.strategies.get(temperature=request.temperature)
            try:
                prompt, sampling = request.for_model(self.served)
                self._rehearse(prompt, sampling, strategy, until - time.monotonic())
            except NoAnswerInTime:
                return  # it answers, and clients wait
            except ContextTooLong as error:
                log.info("a request that was answered does not fit the new bundle: %s", error)

    def _rehearse(
        self, prompt: Sequence[int], sampling: Sampling, strategy: Strategy, timeout: float
    ) -> None:
        over = threading.Event()
        ends: list[Event] = []

        def deliver(event: Event) -> None:
            ends.append(event)
            if not isinstance(event, Delta):
                over.set()

        ticket = Ticket(
            prompt,
            sampling,
            TextStream(self.served.decode),
            deliver,
            deadline=time.monotonic() + timeout,
            strategy=type(strategy)(strategy.config, strategy.resources.private()),
        )
        ticket.own = True
        self.scheduler.submit(ticket, urgent=True)
        answered = over.wait(timeout + 5)
        if not answered or not isinstance(ends[-1], End):
            ticket.cancel()
            failed = ends[-1].error if ends and isinstance(ends[-1], Failure) else "no answer"
            if isinstance(failed, ContextTooLong):
                raise failed
            late = not answered or isinstance(failed, DeadlineExceeded)
            if late:
                raise NoAnswerInTime(f"the new model does not answer ({failed})")
            raise DraftwellError(
                f"the new model does not answer ({failed})", code="new_model_fails"
            )
