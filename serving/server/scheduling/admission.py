"""Admission: a bounded queue that is fair between clients.

Clients are served round robin, and a client's own requests keep their order. So a client that sends
a thousand requests delays another client's by one request per round, not by a thousand. When the
queue is full, a new request displaces the newest request of the client with the most waiting, only
if that request has not started and the new client would still have no more waiting than the other;
otherwise the new one is refused. A request for several answers is several tickets, which are queued
and displaced together.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftwell.serving.server.scheduling.ticket import Ticket

SHORTEST_WAIT, LONGEST_WAIT = 1, 60
"""Bounds of Retry-After, in seconds."""


class QueueFull(Exception):
    """Too many requests already wait.

    Args:
        retry_after_seconds: when to try again, at least 1.
    """

    def __init__(self, retry_after_seconds: int):
        super().__init__(f"too many requests are waiting: try again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class FairQueue:
    """Waiting tickets. Not thread-safe: its owner holds a lock.

    Args:
        capacity: tickets that may wait, at least 1.
    """

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"a queue needs room for at least one request, not {capacity}")
        self.capacity = capacity
        # in the order in which they are served; none is empty
        self._clients: OrderedDict[str, deque[Ticket]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for tickets in self._clients.values() for ticket in tickets)

    def put(self, ticket: Ticket, *, first: bool = False) -> None:
        """Add a ticket. The caller has checked the capacity. `first`: before all others."""
        tickets = self._clients.setdefault(ticket.client, deque())
        if first:
            tickets.appendleft(ticket)
            self._clients.move_to_end(ticket.client, last=False)
        else:
            tickets.append(ticket)
        self._count += 1

    def pop(self) -> Ticket:
        """Take the next ticket out; IndexError if the queue is empty."""
        if not self._clients:
            raise IndexError("the queue is empty")
        client, tickets = next(iter(self._clients.items()))
        ticket = tickets[0]
        self.remove(ticket)
        if tickets:
            self._clients.move_to_end(client)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out, wherever it is; ValueError if it does not wait."""
        tickets = self._clients.get(ticket.client, deque())
        tickets.remove(ticket)
        self._count -= 1
        if not tickets:
            del self._clients[ticket.client]

    def to_displace(self, client: str, count: int = 1, places: int = 1) -> list[Ticket]:
        """Tickets to displace for `count` tickets of `client`: at least `places`, of the newest
        requests that have not started, of the client with the most waiting. Empty if that client
        would then have fewer waiting than `client`."""
        greediest: Sequence[Ticket] = max(self._clients.values(), key=len, default=deque())
        leaving: list[Ticket] = []
        for ticket in reversed(greediest):
            if len(leaving) >= places:
                break
            if not ticket.together.started and ticket not in leaving:
                leaving += [other for other in greediest if other.together is ticket.together]
        fair = len(greediest) - len(leaving) >= len(self._clients.get(client, ())) + count
        return leaving if fair and len(leaving) >= places else []


class ServiceRate:
    """How fast requests were served recently while there were any, for realistic Retry-After
    headers. Its clock is that of the rounds: idle time does not count."""

    REMEMBERED = 32

    def __init__(self) -> None:
        self._busy = 0.0
        self._marks = deque([0.0], maxlen=self.REMEMBERED + 1)  # the first request begins there

    def worked(self, seconds: float) -> None:
        """Count what a round took."""
        self._busy += seconds

    def served(self) -> None:
        """Count a request that held a slot and has ended."""
        self._marks.append(self._busy)

    def seconds_for(self, requests: int) -> int:
        """Seconds until this many requests are served, from 1 to 60; 1 while nothing is known."""
        ends = len(self._marks) - 1
        if not ends:
            return SHORTEST_WAIT
        seconds = requests * (self._busy - self._marks[0]) / ends
        return min(LONGEST_WAIT, max(SHORTEST_WAIT, math.ceil(seconds)))
