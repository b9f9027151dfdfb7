"""When a request has to be answered, whatever it waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from draftwell.serving.server.http.errors import deadline_exceeded


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
