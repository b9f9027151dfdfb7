"""vLLM's server on a port that replicas share, which it leaves before it ends: `python listen.py OPTIONS`, those of vLLM.

Linux gives new connections in turn to all processes that listen on a port with SO_REUSEPORT. A process joins when it listens, which vLLM
does when its engine is ready. Asked to end (SIGTERM) it first stops listening, so that new connections go to the others, answers what it
has begun, `--shutdown-timeout` seconds at most, and only then ends as vLLM does: vLLM itself would go on accepting what it no longer
answers. SIGINT ends it as vLLM does.

A port on which somebody listens is refused unless `DRAFTWELL_REPLICA` is set. Written for vLLM 0.32, whose launcher has one place each
that makes the socket and the HTTP server; a vLLM without them serves, alone on its port, after a line. Besides vLLM it needs Python's own
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


def shared(create: Callable[..., socket.socket], *, join: bool) -> Callable[..., socket.socket]:
    """vLLM's maker of sockets, of one that others may share.

    Args:
        join: whether others may listen on the port already; otherwise the address is in use then, as it would be without sharing.
    """
    def create_server_socket(addr: tuple[str, int], *, reuse_port: bool = False) -> socket.socket:
        if not join and not reuse_port:
            create(addr, reuse_port=False).close()
        return create(addr, reuse_port=True)

    return create_server_socket


def leaving(base: Any, seconds: float) -> Any:
    """vLLM's HTTP server, one that leaves its port when it is asked to end.

    Args:
        seconds: that requests have which it has begun.
    """
    class LeavingServer(base):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            # later than vLLM's own handler, which SIGINT keeps
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.leave, sockets or [])

        def leave(self, sockets: Sequence[socket.socket]) -> None:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for one in sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # a process that the engine forked may hold it too: to close it would not be enough
            for server in self.servers:
                server.close()
            for connection in list(self.server_state.connections):
                connection.shutdown()  # at once where it is idle, else after its answer
            self.draining = asyncio.create_task(self.drain(time.monotonic() + seconds))

        async def drain(self, end: float) -> None:
            while self.server_state.connections and time.monotonic() < end:
                await asyncio.sleep(POLL_SECONDS)
            for connection in list(self.server_state.connections):
                connection.transport.close()  # its client is told, and vLLM stops what nobody waits for
            os.kill(os.getpid(), signal.SIGINT)

    return LeavingServer


def main() -> None:
    """Change the two places, then become vLLM's server."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--shutdown-timeout", type=float, default=0.0)
    seconds = parser.parse_known_args()[0].shutdown_timeout
    try:
        from vllm.entrypoints.launchers import launcher

        launcher.create_server_socket = shared(launcher.create_server_socket, join="DRAFTWELL_REPLICA" in os.environ)
        launcher.NoSignalServer = leaving(launcher.NoSignalServer, seconds)
    except (ImportError, AttributeError) as error:
        print(f"draftwell: this vLLM has another launcher ({error}): its port is not shared with replicas", file=sys.stderr)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":  # processes that the engine spawns import this file
    main()
