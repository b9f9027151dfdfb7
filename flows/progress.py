"""Telling a person how far the loop is: lines on stderr or in the log of a flow's run, not too
many; and where a command shows a live view (`live.LiveView`), there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import INFO, Logger, LoggerAdapter
from typing import Any, Protocol

from draftwell.serving.artifacts.pair_files import draftwell_home

SECONDS_BETWEEN_LINES = 5.0


class View(Protocol):
    """What shows progress while a command works."""

    def line(self, text: str, *, passing: bool = False) -> None:
        """Say a line; `passing`: how far something is, which a live view shows already."""

    def advance(self, done: int, total: int, words: str = "") -> None:
        """So much of a step is done."""

    def best(self, text: str) -> None:
        """The best so far, with its ratio."""


class Silence:
    """A view that shows nothing."""

    def nothing(self, *said: object, **more: object) -> None:
        """Whatever is said."""

    line = step = advance = trying = best = nothing


_shown: list[View] = []
"""The view of the command that this process runs; all of its threads write to it."""


def shown() -> View | None:
    """The view that is open, if one is."""
    return _shown[-1] if _shown else None


@contextmanager
def showing(view: View) -> Iterator[None]:
    """Let all that is told in this block go through a view."""
    _shown.append(view)
    try:
        yield
    finally:
        _shown.remove(view)


def announce(line: str, *, passing: bool = False) -> None:
    """One line, in the log of the run that says it, where Prefect keeps that, else on stderr: a
    command hides Prefect's log.

    Args:
        passing: as for `View.line`.
    """
    if (log := run_log()) is not None:
        log.info(line)
    if (view := shown()) is not None:
        view.line(line, passing=passing)
    elif log is None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def announce_step(name: str, number: int, of: int) -> None:
    """That a step begins: a live view knows such a line."""
    announce(f"{number}/{of} {name}")


def tell_best(text: str) -> None:
    """What is the best so far, for the view that is open."""
    if (view := shown()) is not None:
        view.best(text)


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
    every five seconds; a view gets every one."""
    last = clock()

    def show(done: int, total: int, words: str = "") -> None:
        nonlocal last
        if (view := shown()) is not None:
            view.advance(done, total, words)
        if done < total and clock() - last < SECONDS_BETWEEN_LINES:
            return
        last = clock()
        announce(f"    {title}: {done}/{total} {words}".rstrip(), passing=True)

    return show
