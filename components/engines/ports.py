"""Ports of this machine: a free one, and whether one can be listened on."""

from __future__ import annotations

import socket

from draftwell.serving.errors import DraftwellError


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def refuse_taken(port: int) -> None:
    """Refuse a port that a server could not listen on, before the minutes that it takes to start.

    Raises:
        DraftwellError: somebody listens there, or it cannot be used (`engine_port_taken`).
    """
    try:
        with socket.socket() as tried:
            # one that a server has just left is free
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("127.0.0.1", port))
            tried.listen(1)
    except (OSError, OverflowError) as error:
        raise DraftwellError(
            f"port {port} cannot be listened on ({error}): end what listens there, or name another "
            "one with --port",
            code="engine_port_taken",
        ) from error
