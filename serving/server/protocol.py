"""Uvicorn's HTTP protocol with bounds on how many connections are open, and on what a client may
leave undone: the rest of a request's headers, and reading its answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import cache
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

try:
    import resource
except ImportError:  # Windows, where sockets are no files
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

HEADER_SECONDS = 30.0
"""How long a request's headers may take to arrive, from the connection or from their first byte
on."""
STALL_SECONDS = 120.0
"""How long a client may read nothing of an answer that waits to be sent."""
MOST_CONNECTIONS = 8192
"""Twice as many as requests are answered at once (guards.py), so that probes find room beside all
of them."""
OTHER_FILES = 128
"""Files that the process needs besides connections."""


@cache
def most_connections() -> int:
    """Connections at once: `MOST_CONNECTIONS`, or what the process's limit of open files leaves,
    which is raised first where the system allows it: its usual value of 1,024 is meant for programs
    that know no larger numbers."""
    if resource is None:
        return MOST_CONNECTIONS
    wanted = 2 * MOST_CONNECTIONS  # many may be accepted before the first of them is counted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - OTHER_FILES))


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Ends the connections of clients that are too slow, so that they and the requests' slots are
    free."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._headers: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._used = self.loop.time()  # when the last answer ended, or the connection began

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for headers, and be told of every byte that cannot be sent at once."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self._await_headers()
        if len(self.connections) > most_connections():
            self._make_room()

    @property
    def silent(self) -> bool:
        """Whether no request is being answered, no answer waits to be read, and at most headers are
        sent."""
        return self._reading is None and (self.cycle is None or bool(self.cycle.response_complete))

    def _make_room(self) -> None:
        """Close silent connections, first those that have been so for longest: whoever asks at once
        is served, however many others are opened. Several at a time, since looking for them takes a
        while; this one itself where none is silent."""
        silent = sorted(
            (one for one in self.connections if one.silent and one is not self),
            key=lambda one: one._used,
        )
        closed = silent[: 1 + most_connections() // 16] or [self]
        log.warning(
            "more than %d connections are open: %d on which nothing is asked are closed",
            most_connections(),
            len(closed),
        )
        for one in closed:
            # it no longer counts for those that come in the same moment
            self.connections.discard(one)
            one.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Note whether headers are complete."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_headers()
        else:
            self._stop("_headers")

    def on_response_complete(self) -> None:
        """It is silent from now on."""
        self._used = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than the server writes."""
        super().pause_writing()
        self._reading = self.loop.call_later(
            STALL_SECONDS, self._check_reading, self.transport.get_write_buffer_size()
        )

    def resume_writing(self) -> None:
        """It has read all."""
        self._stop("_reading")
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop("_headers", "_reading")
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        if self._headers is None and not self.transport.is_closing():
            self._headers = self.loop.call_later(
                HEADER_SECONDS, self._end, "sent no complete headers"
            )

    def _check_reading(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self._end("stopped reading its answer")
        else:
            self._reading = self.loop.call_later(STALL_SECONDS, self._check_reading, left)

    def _stop(self, *timers: str) -> None:
        for name in timers:
            if (timer := getattr(self, name)) is not None:
                timer.cancel()
                setattr(self, name, None)

    def _end(self, why: str) -> None:
        log.info("a client %s: its connection is closed", why)
        self.transport.abort()
