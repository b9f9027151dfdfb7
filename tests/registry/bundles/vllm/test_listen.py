"""A server that leaves its port, in this process: what becomes of connections in every state,
without a race."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from draftwell.registry.bundles.vllm.files import listen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT of Linux")

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
ANSWERED = b"HTTP/1.1 200 OK\r\n"


class OneServer:
    """A leaving server on a port of its own.

    Args:
        size: bytes of an answer.
        seconds: that requests have.
    """

    def __init__(self, size: int = 2, seconds: float = 10.0, **options: Any):
        self.listener = shared_socket(0)
        self.port, self.size = self.listener.getsockname()[1], size
        config = uvicorn.Config(self.app, interface="asgi3", lifespan="off", log_config=None)
        self.server = listen.leaving(uvicorn.Server, seconds, **options)(config)
        self.server.capture_signals = contextlib.nullcontext
        self.clients: list[socket.socket] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.1)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", str(self.size).encode())],
            }
        )
        await send({"type": "http.response.body", "body": b"x" * self.size})

    async def start(self) -> None:
        self.task = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        while not self.server.started and not self.task.done():
            await asyncio.sleep(0.01)

    def client(self, sent: bytes = REQUEST) -> socket.socket:
        """A connection, which the kernel accepts; the loop does not run meanwhile."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        made.setblocking(False)
        made.sendall(sent)
        self.clients.append(made)
        return made

    async def end(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        for one in (*self.clients, self.listener):
            one.close()


def shared_socket(port: int) -> socket.socket:
    """One that is bound, as vLLM's launcher makes it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    return made


async def answer(client: socket.socket) -> bytes:
    """The beginning of what a client reads; empty where the connection is closed instead."""
    return (await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 4000), 5))[
        : len(ANSWERED)
    ]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Signals with which the server would have ended this process."""
    sent: list[int] = []
    monkeypatch.setattr(
        listen, "os", SimpleNamespace(kill=lambda _, number: sent.append(number), getpid=lambda: 0)
    )
    monkeypatch.setattr(listen, "FRESH_SECONDS", 0.3)
    before = signal.getsignal(signal.SIGTERM)
    yield sent
    signal.signal(signal.SIGTERM, before)


def run(one: OneServer, states: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        try:
            await states
        finally:
            await one.end()

    asyncio.run(whole())


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_what_the_kernel_or_the_loop_has_accepted_is_answered(turns: int, ended: list[int]) -> None:
    """The kernel reset what nobody had accepted; what the loop had, but not the server, met an
    engine that had ended.

    Args:
        turns: of the loop, after which the connections are accepted but not among the server's yet.
    """
    one = OneServer()

    async def states() -> None:
        await one.start()
        clients = [one.client() for _ in range(40)]
        for _ in range(turns):
            await asyncio.sleep(0)
        one.server.leave([one.listener])
        with pytest.raises(ConnectionRefusedError):
            one.client()
        assert {await answer(client) for client in clients} == {ANSWERED}
        assert ended == []
        await one.server.draining
        assert ended == [signal.SIGINT]

    run(one, states())


def test_a_fresh_connection_may_ask_once_and_an_idle_one_is_closed_at_once(
    ended: list[int],
) -> None:
    one = OneServer()

    async def states() -> None:
        await one.start()
        idle, fresh, silent = one.client(), one.client(b""), one.client(b"")
        assert await answer(idle) == ANSWERED
        while len(one.server.server_state.connections) < 3:
            await asyncio.sleep(0.01)
        one.server.leave([one.listener])
        assert await answer(idle) == b""
        await asyncio.sleep(0.1)
        fresh.sendall(REQUEST)
        assert await answer(fresh) == ANSWERED
        assert await answer(fresh) == b"", "it was told to close"
        assert await answer(silent) == b""
        await asyncio.wait_for(one.server.draining, 1)

    run(one, states())


def test_a_client_that_does_not_read_keeps_nobody(ended: list[int]) -> None:
    one = OneServer(size=50_000_000, seconds=0.3)

    async def states() -> None:
        await one.start()
        one.client()
        while not one.server.server_state.connections:
            await asyncio.sleep(0.01)
        one.server.leave([one.listener])
        await one.server.draining
        await asyncio.sleep(0.05)
        assert not one.server.server_state.connections

    run(one, states())


def test_of_two_that_start_at_once_the_later_one_is_refused(ended: list[int]) -> None:
    """Neither listens while the engines start, so the look before them finds nobody."""

    def create(address: tuple[str, int], *, reuse_port: bool) -> socket.socket:
        with contextlib.ExitStack() as stack:
            made = stack.enter_context(socket.socket())
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            stack.pop_all()
        return made

    first = OneServer(refuse=create)
    second = OneServer(refuse=create)
    second.listener.close()
    second.listener = shared_socket(first.port)

    async def states() -> None:
        await first.start()
        await second.start()
        with pytest.raises(OSError, match="Address already in use"):
            second.task.result()
        second.listener.close()
        assert await answer(first.client()) == ANSWERED

    run(first, states())
