"""Telling a person how far the loop is: lines on stderr or in the log of a flow's run, not too
many."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from logging import INFO, Logger, LoggerAdapter
from typing import Any

from draftwell.serving.artifacts.pair_files import draftwell_home

SECONDS_BETWEEN_LINES = 5.0


def announce(line: str) -> None:
    """One line, in the log of the run that says it, where Prefect keeps that, else on stderr: the
    demo hides Prefect's log."""
    if (log := run_log()) is not None:
        log.info(line)
        return
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def run_log() -> Logger | LoggerAdapter[Any] | None:
    """The log of the flow or task that runs here; None outside of one, and where lines like these
    are not kept."""
    if "prefect" not in sys.modules:
        return None
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_run_logger

    try:
        log = get_run_logger()
    except MissingContextError:
        return None
    return log if log.isEnabledFor(INFO) else None


def settle_prefect() -> None:
    """For commands that run flows, before Prefect is imported: it says nothing, because what went
    wrong is the command's to say, keeps its state in the home, where `make prefect-server` has it
    too, and not in `~/.prefect`, and the server that it starts for a command has time to come up on
    a busy machine (Prefect gives it 20 seconds)."""
    if "PREFECT_HOME" not in os.environ:
        home = draftwell_home() / "prefect"
        # Prefect's server opens a database there, and makes no folder for it
        home.mkdir(parents=True, exist_ok=True)
        os.environ["PREFECT_HOME"] = str(home)
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "300")


def counting(title: str, clock: Callable[[], float] = time.monotonic) -> Callable[..., None]:
    """A progress callback (done, total, words) that announces the last step, and others at most
    every five seconds."""
    shown = clock()

    def show(done: int, total: int, words: str = "") -> None:
        nonlocal shown
        if done < total and clock() - shown < SECONDS_BETWEEN_LINES:
            return
        shown = clock()
        announce(f"    {title}: {done}/{total} {words}".rstrip())

    return show
