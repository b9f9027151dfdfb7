"""Uvicorn's HTTP protocol with bounds on what a client may leave undone: the rest of a request's headers, and reading its answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

log = logging.getLogger(__name__)

HEADER_SECONDS = 30.0
"""How long a request's headers may take to arrive, from the connection or from their first byte on."""
STALL_SECONDS = 120.0
"""How long a client may read nothing of an answer that waits to be sent."""


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Ends the connections of clients that are too slow, so that they and the requests' slots are free."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._headers: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for headers, and be told of every byte that cannot be sent at once."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Note whether headers are complete."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_headers()
        else:
            self._stop("_headers")

    def pause_writing(self) -> None:
        """The client reads more slowly than the server writes."""
        super().pause_writing()
        self._reading = self.loop.call_later(STALL_SECONDS, self._check_reading, self.transport.get_write_buffer_size())

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
            self._headers = self.loop.call_later(HEADER_SECONDS, self._end, "sent no complete headers")

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

