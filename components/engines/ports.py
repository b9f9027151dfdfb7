"""Ports of this machine: a free one, and whether one is taken."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from draftwell.serving.errors import DraftwellError

LISTEN = "0A"
"""State of a socket that listens, in `/proc/net/tcp`."""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def refuse_taken(port: int, host: str = "127.0.0.1") -> None:
    """Refuse a port that a server could not listen on, before the minutes that it takes to start.

    Raises:
        DraftwellError: somebody listens there (`engine_port_taken`), or it cannot be used
            (`bad_port`).
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            # one that a server has just left is free
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
            tried.listen(1)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise DraftwellError(
                (
                    f"port {port} of {host} is taken: end what listens there, or name another "
                    "one with --port"
                ),
                code="engine_port_taken",
            ) from error
        raise DraftwellError(
            f"port {port} of {host} cannot be listened on ({error}): name another one with --port",
            code="bad_port",
        ) from error


def listening(pid: int) -> frozenset[int]:
    """TCP ports on which a process of this machine listens; none where it is gone, is another
    user's, or the system has no /proc."""
    sockets = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    return frozenset(port for inode, port in listeners() if f"socket:[{inode}]" in sockets)


def listeners() -> list[tuple[str, int]]:
    """Inode and port of every TCP socket of this machine that listens (`/proc/net/tcp`)."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *more = row.split()
                if state == LISTEN:
                    found.append((more[5], int(local.rpartition(":")[2], 16)))
    return found
