"""The server's process: its exit codes, and before it serves its socket and signals. No heavy
library is imported here."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from draftwell.serving.errors import DraftwellError

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of a process that SIGINT or SIGTERM ended before it served."""
DEVICE_FAILED = 70
"""Exit code of a server whose device has failed for good (EX_SOFTWARE of sysexits.h): its
supervisor starts it again."""
HUNG = 75
"""Exit code of a server in which something hangs (EX_TEMPFAIL of sysexits.h): its supervisor starts
it again."""


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
def ended_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the process at once, even while the main thread waits for the thread
    that loads: before it serves, nothing is lost."""
    # the system's own handlers do nothing for a container's first process
    defaults = {
        signal.SIGINT: (signal.default_int_handler, INTERRUPTED),
        signal.SIGTERM: (signal.SIG_DFL, TERMINATED),
    }
    before = {
        number: default
        for number, (default, _) in defaults.items()
        # else the caller's own, or ignored, as in the background
        if signal.getsignal(number) == default
    }
    for number in before:
        signal.signal(number, lambda number, _: os._exit(defaults[signal.Signals(number)][1]))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
