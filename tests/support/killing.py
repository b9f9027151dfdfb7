"""Processes that die by SIGKILL at a chosen moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.paths import REPO


def deadly(
    real: Callable[..., Any],
    number: int,
    *,
    after: bool = False,
    counts: Callable[..., bool] = lambda *_: True,
    last: Callable[..., object] = lambda *_: None,
) -> Callable[..., Any]:
    """The same function, whose `number`-th call is the last thing that this process does.

    Args:
        after: it dies behind that call, not before it.
        counts: which calls do, by their arguments.
        last: called with the arguments before it dies.
    """
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += counts(*args)
        dies = counts(*args) and calls == number
        value = real(*args, **kwargs) if after or not dies else None
        if dies:
            last(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    return call


def child(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A module's run in a fresh interpreter, not a fork: pyarrow's threads do not survive a fork.
    It ends well, or dies by its own hand."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (-signal.SIGKILL, 0), done.stderr
    return done


def forked(work: Callable[[], object]) -> int:
    """Start some work in a process of its own; returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a process; minus the signal that killed it, else its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
