"""Notifications about requests, for metrics and feedback; the scheduler does not depend on them.

All methods are called on the scheduler's thread, between two steps of the engine: they must be
quick and must not block (move slow work to a queue of your own). An exception is logged once per
observer and method, and affects no request.

The life of a ticket: `admitted` when it gets a slot, `progressed` after each round that gave it
final tokens, `finished` once with its last event. A ticket that ends while it waits (cancelled,
past its deadline) is `finished` without `admitted`. A ticket that the queue refuses (`QueueFull`,
`SchedulerClosed`) is not reported here: `submit` raises to its caller.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwell.serving.server.scheduling.ticket import Event, Ticket

log = logging.getLogger(__name__)


class Observer:
    """Listens to a scheduler; every method does nothing unless overridden.

    One observer may listen to several schedulers, one after another and, during a switch of
    bundles, two at once: their threads then call it at the same time.
    """

    def admitted(self, ticket: Ticket) -> None:
        """The ticket holds a slot; `ticket.job` is set, and `ticket.strategy` is the strategy that
        decodes it."""

    def stepped(self, running: int, waiting: int, seconds: float) -> None:
        """A round has ended: requests that hold a slot, requests that wait for one, and seconds of
        the engine's step."""

    def progressed(self, ticket: Ticket, tokens: int) -> None:
        """`tokens` tokens, at least 1, became final; `ticket.first_token_at` is set from the first
        call on."""

    def finished(self, ticket: Ticket, event: Event) -> None:
        """The ticket ended in an `End`, a `Failure` or `Cancelled`, which its client has been sent;
        `ended_at` is set."""


class Observers:
    """Several observers as one whose methods never raise."""

    def __init__(self, observers: Sequence[Observer] = ()):
        self._observers = tuple(observers)
        self._reported: set[tuple[str, str]] = set()

    def notify(self, method: str, *values: Any) -> None:
        """Call a method of `Observer` on all of them."""
        for observer in self._observers:
            try:
                getattr(observer, method)(*values)
            except Exception:
                key = type(observer).__name__, method
                if key not in self._reported:  # once: a log line each round would fill the disk
                    self._reported.add(key)
                    log.exception("%s.%s failed; it will still be called", *key)
