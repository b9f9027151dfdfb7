"""Ports of this machine: a free one, and whether one is taken."""

from __future__ import annotations

import errno
import socket

from serving.errors import DraftwellError


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def refuse_taken(port: int, host: str = "127.0.0.1") -> None:
    """Refuse a port that a server could not listen on, before the minutes that it takes to start.

    Raises:
        DraftwellError: somebody listens there (`engine_port_taken`), or it cannot be used (`bad_port`).
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that a server has just left is free
            tried.bind((host, port))
            tried.listen(1)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise DraftwellError(f"port {port} of {host} is taken: end what listens there, or name another one with --port",
                                 code="engine_port_taken") from error
        raise DraftwellError(f"port {port} of {host} cannot be listened on ({error}): name another one with --port",
                             code="bad_port") from error
