"""`vllm.entrypoints.launchers.launcher` of vLLM 0.32, as far as `listen.py` changes it and with
what it does at the end.

Asked to end, vLLM first lets its engine finish what it has and refuse the rest, and only then stops
listening.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn


class NoSignalServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, peer_loads: Any = None) -> None:
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def create_server_socket(addr: tuple[str, int], *, reuse_port: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(addr)
    return sock


async def serve_http(app: Any, sock: socket.socket, engine: Any) -> None:
    server = NoSignalServer(uvicorn.Config(app, log_level="warning", timeout_keep_alive=5))
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]))
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)

    async def end() -> None:
        await asked.wait()
        await engine.shutdown()
        task.cancel()

    ending = asyncio.create_task(end())
    with contextlib.suppress(asyncio.CancelledError):
        await task
        return
    await ending
    await server.shutdown()
