"""Ports for engines that run next to each other."""

from __future__ import annotations

import socket
from random import SystemRandom


def two_free_ports() -> int:
    """The first of two ports that follow each other, where the system gives none by itself to
    whoever connects."""
    while True:
        port = SystemRandom().randrange(20_000, 30_000, 2)
        if all(map(is_free, (port, port + 1))):
            return port


def is_free(port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
