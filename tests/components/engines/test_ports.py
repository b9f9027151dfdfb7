"""Ports: a free one is free, one that somebody listens on is refused in a line, and the next server
may have it at once."""

from __future__ import annotations

import socket

from draftwell.components.engines.ports import free_port, refuse_taken
from tests.support.errors import raises_code


def test_a_taken_port_is_refused_until_it_is_left() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        with raises_code("engine_port_taken", str(port), "--port"):
            refuse_taken(port)
        with socket.create_connection(("127.0.0.1", port)):
            pass
    refuse_taken(port)
    refuse_taken(free_port())


def test_what_cannot_be_listened_on_is_refused() -> None:
    with raises_code("engine_port_taken", "70000", "--port"):
        refuse_taken(70_000)
