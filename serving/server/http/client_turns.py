"""Threads for what a request needs before it can wait for a slot: so much of one client's at once,
the rest of its in turn.

So a client with a thousand long prompts, or grammars that take seconds to compile, delays another
client's request by a few of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

MOST_AT_ONCE = 2
"""Pieces of one client's work that run at once."""


@dataclass
class Turns:
    """One client's.

    Args:
        users: pieces of work that run or wait.
    """

    free: asyncio.Semaphore
    users: int = 0


class ClientTurns:
    """Runs work of clients on a pool of threads. To be used on one event loop.

    Args:
        most: pieces of one client's work at once.
    """

    def __init__(self, pool: ThreadPoolExecutor, most: int = MOST_AT_ONCE):
        self._pool, self._most = pool, most
        self._clients: dict[str, Turns] = {}

    async def run(self, client: str, work: Callable[..., T], *given: Any, **options: Any) -> T:
        """What `work` returns. If nobody waits for it any more its turn lasts until the thread is
        done with it: work cannot be stopped."""
        turns = self._clients.setdefault(client, Turns(asyncio.Semaphore(self._most)))
        turns.users += 1
        try:
            await turns.free.acquire()
        except BaseException:
            self._leave(client, turns)
            raise
        loop = asyncio.get_running_loop()

        def end() -> None:
            turns.free.release()
            self._leave(client, turns)

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(end)

        future = self._pool.submit(work, *given, **options)
        future.add_done_callback(ended)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.cancel()  # if it has not begun
            raise

    def _leave(self, client: str, turns: Turns) -> None:
        turns.users -= 1
        if not turns.users:
            del self._clients[client]
