"""One part in a process of its own that is ended at a limit: whatever becomes of it, the next part
finds an empty device.

The process is a copy of this one (fork), so that no part imports torch again. This one must not
have used CUDA before, nor computed on several threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from draftwell.components.engines.failures import last_line
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.engine.workers import on_own_thread

State = Literal["measured", "failed", "stopped", "skipped"]
DIES_WITH_PARENT = 1
"""Linux's PR_SET_PDEATHSIG."""


def run_limited(work: Callable[[], object], seconds: float, log: Path) -> tuple[State, str]:
    """Let `work` run for `seconds` at most.

    Args:
        log: file for all that it prints.
    Returns:
        measured, failed or stopped, and why, in a line; "" where it was measured.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # a copy of a thread that has computed waits for a team of threads that the copy lacks
    return on_own_thread(_limited, work, seconds, log)


def _limited(work: Callable[[], object], seconds: float, log: Path) -> tuple[State, str]:
    process = get_context("fork").Process(target=_work_alone, args=(work, log))
    process.start()
    try:
        process.join(seconds)
        stopped = process.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()  # it may not have had its group yet
        process.join()
    if stopped:
        return "stopped", f"not done after {seconds:.0f} s"
    if process.exitcode:
        return "failed", last_line(log).removeprefix("Error: ")
    return "measured", ""


def _work_alone(work: Callable[[], object], log: Path) -> None:
    """Do the work as the first process of a group, with its output in the log."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    code = 1
    try:
        work()
        code = 0
    except DraftwellError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        code = 2
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # what the first process left to do at its end (Prefect's threads) is not for a copy
        os._exit(code)
