"""The server's process before it serves: its socket and SIGINT. No heavy library is imported
here."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from draftwell.serving.errors import DraftwellError

INTERRUPTED = 130
"""Exit code of a process ended by SIGINT."""
DEVICE_FAILED = 70
"""Exit code of a server whose device has failed for good (EX_SOFTWARE of sysexits.h): its
supervisor starts it again."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket.

    Raises:
        DraftwellError: the address is not available (`address_unavailable`).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise DraftwellError(
            (
                f"cannot listen on {host}:{port} ({error.strerror or error}): choose another "
                "--host or --port"
            ),
            code="address_unavailable",
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """host:port of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """SIGINT ends the process at once, even while the main thread waits for the thread that loads:
    before it serves, nothing is lost."""
    before = signal.getsignal(signal.SIGINT)
    # the caller's own, or ignored, as in the background
    if before is not signal.default_int_handler:
        yield
        return
    # the system's own handler does nothing for a container's first process
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
