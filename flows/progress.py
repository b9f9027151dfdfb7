"""Telling a person how far the loop is: lines on stderr, not too many, the same in a terminal and in a log file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

SECONDS_BETWEEN_LINES = 5.0


def announce(line: str) -> None:
    """One line on stderr. Prefect turns `print` into log records, which the demo hides."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def settle_prefect() -> None:
    """For commands that run flows, before Prefect is imported: it says only what went wrong, and the server that it starts for a command
    has time to come up on a busy machine (Prefect gives it 20 seconds)."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "300")


def counting(title: str, clock: Callable[[], float] = time.monotonic) -> Callable[..., None]:
    """A progress callback (done, total, words) that announces the last step, and others at most every five seconds."""
    shown = clock()

    def show(done: int, total: int, words: str = "") -> None:
        nonlocal shown
        if done < total and clock() - shown < SECONDS_BETWEEN_LINES:
            return
        shown = clock()
        announce(f"    {title}: {done}/{total} {words}".rstrip())

    return show
