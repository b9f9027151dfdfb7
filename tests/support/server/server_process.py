"""`draftwell-serve` in a process of its own, and waiting for it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

ENTRY = [sys.executable, "-c", "from draftwell.serving.server.main import main; main()"]
"""`draftwell-serve`, wherever scripts are installed."""


def entry_with(**constants: float) -> list[str]:
    """`ENTRY` with other values of what no option names.

    Args:
        constants: `bodies_bytes`, `state_seconds` or `per_minute`.
    """
    places = {
        "bodies_bytes": ("draftwell.serving.server.http.bodies", "MOST_BODIES_BYTES"),
        "state_seconds": ("draftwell.serving.server.feedback.persistence", "STATE_SECONDS"),
        "per_minute": ("draftwell.serving.server.feedback.persistence", "PER_MINUTE"),
    }
    # before other modules read them
    lines = ["from importlib import import_module"]
    for name, value in constants.items():
        module, constant = places[name]
        lines += [
            f"assert hasattr(place := import_module({module!r}), {constant!r})",
            f"place.{constant} = {value!r}",
        ]
    return [sys.executable, "-c", "\n".join([*lines, *ENTRY[2].split("; ")])]


@contextmanager
def server_process(
    command: Sequence[str], **options: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its address, without a path; it is killed at the end, if it has not
    ended by itself.

    Args:
        command: starts the server, which prints its address.
        options: as `subprocess.Popen` takes them.
    """
    with subprocess.Popen(list(command), stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            assert process.stdout is not None
            found = next(
                (found for line in process.stdout if (found := re.search(r"http://[^/\s]+", line))),
                None,
            )
            assert found, (
                "no address was printed: "
                f"{process.stderr.read() if process.stderr else 'see stderr'}"
            )
            yield process, found.group()
        finally:
            process.kill()


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 150.0) -> Any:
    """Wait for a condition and return its value; fail with `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.01)
    return value
