"""vLLM's server on a port that replicas share, which it leaves before it ends: `python listen.py
OPTIONS`, those of vLLM.

Linux gives new connections in turn to all processes that listen on a port with SO_REUSEPORT. A
process joins when it listens, which vLLM does when its engine is ready. Asked to end (SIGTERM) it
first stops listening, so that new connections go to the others, answers what it has begun,
`--shutdown-timeout` seconds at most, and only then ends as vLLM does: vLLM itself would go on
accepting what it no longer answers. SIGINT ends it as vLLM does.

A port on which somebody listens is refused unless `DRAFTWELL_REPLICA` is set: before the engine
starts, and again when it is ready, because of two that start at the same time neither listens yet.
Written for vLLM 0.32, whose launcher has one place each that makes the socket and the HTTP server;
a vLLM without them serves, alone on its port, after a line. Besides vLLM it needs Python's own
library alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

POLL_SECONDS = 0.05
FRESH_SECONDS = 5.0
"""That a client has to send the first request of a connection, once the server leaves: clients keep
spare connections open, too."""


def shared(create: Callable[..., socket.socket], *, join: bool) -> Callable[..., socket.socket]:
    """vLLM's maker of sockets, of one that others may share.

    Args:
        join: whether others may listen on the port already; otherwise the address is in use then,
            as it would be without sharing.
    """

    def create_server_socket(addr: tuple[str, int], *, reuse_port: bool = False) -> socket.socket:
        if not join and not reuse_port:
            create(addr, reuse_port=False).close()
        return create(addr, reuse_port=True)

    return create_server_socket


def leaving(base: Any, seconds: float, refuse: Callable[..., socket.socket] | None = None) -> Any:
    """vLLM's HTTP server, one that leaves its port when it is asked to end.

    Args:
        seconds: that requests have which it has begun.
        refuse: vLLM's maker of sockets, which fails where somebody listens on the port; None: the
            port may be shared.
    """

    class LeavingServer(base):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            for one in sockets or []:
                if refuse is not None and one.family != socket.AF_UNIX:
                    refuse(one.getsockname()[:2], reuse_port=False).close()
            await super().startup(sockets=sockets)
            # later than vLLM's own handler, which SIGINT keeps
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.leave, sockets or [])

        def leave(self, sockets: Sequence[socket.socket]) -> None:
            """Stop listening; the process ends when what it has begun is answered."""
            loop = asyncio.get_running_loop()
            loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            waiting: list[socket.socket] = []
            for one in sockets:
                waiting += accepted(one)  # else the kernel would reset them
                with contextlib.suppress(OSError):
                    # a process that the engine forked may hold it too: to close it would not be
                    # enough
                    one.shutdown(socket.SHUT_RDWR)
            self.connecting = {loop.create_task(self.connect(one)) for one in waiting}
            self.draining = loop.create_task(self.drain(time.monotonic() + seconds))

        async def connect(self, connection: socket.socket) -> None:
            """Serve a connection that was accepted here, as vLLM's server does with those that it
            accepts."""

            def protocol() -> Any:
                return self.config.http_protocol_class(
                    config=self.config,
                    server_state=self.server_state,
                    app_state=self.lifespan.state,
                    _loop=loop,
                )

            loop = asyncio.get_running_loop()
            try:
                await loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl)
            except Exception:  # such as a failed TLS handshake, which the client sees
                connection.close()

        async def drain(self, end: float) -> None:
            """Wait until all connections have ended, and end the process.

            Args:
                end: time (`time.monotonic`) at which those that are left are cut.
            """
            for server in self.servers:
                server.close()  # not before those that the loop has just accepted have a transport
            told: set[Any] = set()
            fresh_end, quiet = min(end, time.monotonic() + FRESH_SECONDS), 0
            # twice: the loop may have accepted one that is not among the connections yet
            while quiet < 2 and time.monotonic() < end:
                open_ones = list(self.server_state.connections)
                for connection in open_ones:
                    # None: none yet; a WebSocket has no such thing
                    request = getattr(connection, "cycle", connection)
                    if request in told or (request is None and time.monotonic() < fresh_end):
                        continue
                    connection.shutdown()  # at once where it is idle, else after its answer
                    if request is not None:
                        told.add(request)
                quiet = (
                    0
                    if open_ones or not all(task.done() for task in self.connecting)
                    else quiet + 1
                )
                await asyncio.sleep(POLL_SECONDS)
            for connection in list(self.server_state.connections):
                # also where the client does not read; vLLM stops what nobody waits for
                connection.transport.abort()
            os.kill(os.getpid(), signal.SIGINT)

    return LeavingServer


def accepted(listener: socket.socket) -> list[socket.socket]:
    """The connections that wait to be accepted."""
    found: list[socket.socket] = []
    listener.setblocking(False)
    while True:
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:
            continue
        except OSError:  # none is left, or no file may be opened any more
            return found
        connection.setblocking(False)
        found.append(connection)


def main() -> None:
    """Change the two places, then become vLLM's server."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--shutdown-timeout", type=float, default=0.0)
    seconds = parser.parse_known_args()[0].shutdown_timeout
    try:
        from vllm.entrypoints.launchers import launcher

        create, join = launcher.create_server_socket, "DRAFTWELL_REPLICA" in os.environ
        launcher.create_server_socket = shared(create, join=join)
        launcher.NoSignalServer = leaving(
            launcher.NoSignalServer, seconds, None if join else create
        )
    except (ImportError, AttributeError) as error:
        print(
            (
                f"draftwell: this vLLM has another launcher ({error}): its port is not shared "
                "with replicas"
            ),
            file=sys.stderr,
        )
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":  # processes that the engine spawns import this file
    main()
