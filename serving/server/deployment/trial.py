"""How the first requests of a new bundle end: whether it has to be taken back."""

from __future__ import annotations

import threading

from draftwell.serving.errors import InvalidRequest, OutOfMemory
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.admission import QueueFull
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.scheduling.ticket import (
    Cancelled,
    DeadlineExceeded,
    Event,
    Failure,
    SchedulerClosed,
    Ticket,
)

ENDS = 50
"""Requests that a trial lasts."""
FEWEST_FAULTS, MOST_FAULTS = 3, 0.1
"""A bundle is taken back for more than this share of its requests, and for no fewer faults."""
NO_FAULTS = (InvalidRequest, QueueFull, DeadlineExceeded, OutOfMemory, SchedulerClosed)
"""What clients or load cause; memory is short while two bundles are there."""


class Trial(Observer):
    """Counts the ends of one model's requests; those of other models on the same scheduler do not
    count."""

    def __init__(self) -> None:
        self._served: ServedModel | None = None
        self._ends = self._faults = 0
        self._last: Exception | None = None
        self._counting = threading.Lock()
        self._over = threading.Event()

    def begin(self, served: ServedModel) -> None:
        """Count from now on for a model that has just begun to serve."""
        self._ends = self._faults = 0
        self._over.clear()
        self._served = served

    def settle(self) -> None:
        """End the trial now: another bundle comes."""
        self._over.set()

    def fault(self, seconds: float) -> str | None:
        """Why the model has to be taken back, known after so many seconds or `ENDS` requests at
        most; None where it may stay."""
        self._over.wait(seconds)
        with self._counting:
            self._served, last, self._last = None, self._last, None
        if not self._failed:
            return None
        return f"failed {self._faults} of {self._ends} requests ({type(last).__name__}: {last})"

    def finished(self, ticket: Ticket, event: Event) -> None:
        """Count a request's end."""
        with self._counting:
            mine = self._served is not None and ticket.served is self._served
            if not mine or ticket.own or isinstance(event, Cancelled):
                return
            self._ends += 1
            if isinstance(event, Failure) and not isinstance(event.error, NO_FAULTS):
                self._faults, self._last = self._faults + 1, event.error
            if self._ends >= ENDS or self._failed:
                self._over.set()

    @property
    def _failed(self) -> bool:
        return self._faults >= FEWEST_FAULTS and self._faults > MOST_FAULTS * self._ends
