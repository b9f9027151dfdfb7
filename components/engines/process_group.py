"""The one way to start another program that computes or serves: in a process group of its own, with
a log, and ended with all that it started, also where this process is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from draftwell.components.engines.failures import why_ended
from draftwell.serving.errors import DraftwellError

START_SECONDS = 1800.0
"""vLLM compiles for minutes when it starts for the first time."""
END_SECONDS = 10.0
GROUP_OF_PARENT = Path(__file__).parent / "drivers" / "group_of_parent.py"
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD", "TORCHINDUCTOR_CACHE_DIR")
"""Variables of this process's environment that another interpreter must not see; PyTorch sets the
last one in this process."""


class ProcessGroup:
    """A command in a process group of its own.

    It is no session of its own, because Linux shares a busy machine among sessions.

    Args:
        label: names it in errors, such as `vllm/ngram`.
        log: file for all that it prints; each start begins a new one.
        env: its variables; None: those of this process.
        piped: whether its input and output are pipes, `stdin` and `stdout`; otherwise it has no
            input, and its output goes into the log, too.
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        piped: bool = False,
    ):
        self.label, self.log = label, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            watched, self._alive = os.pipe()
            self.process = subprocess.Popen(
                [sys.executable, "-ES", str(GROUP_OF_PARENT), str(watched), *command],
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else out,
                stderr=out,
                env=env,
                pass_fds=[watched],
                process_group=0,
            )
        os.close(watched)
        self.pid, self.stdin, self.stdout = (
            self.process.pid,
            self.process.stdin,
            self.process.stdout,
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group; SIGSTOP and SIGCONT let it rest."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def exchange(self, line: bytes) -> bytes:
        """Write a line to a piped command and read one; empty where the command ends meanwhile."""
        assert self.stdin is not None
        assert self.stdout is not None
        try:
            self.stdin.write(line)
            self.stdin.flush()
        except BrokenPipeError:
            return b""
        return self.stdout.readline()

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Of the command, negative for a signal; None where it has not ended within so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def why_ended(self, code: str, seconds: float = END_SECONDS) -> DraftwellError:
        """The error for a command that ended by itself.

        Args:
            code: of the error, where the log names no known failure.
            seconds: that it is given to end.
        """
        return why_ended(self.label, self.log, self.exit_code(seconds), code)

    def end(self, seconds: float = END_SECONDS) -> None:
        """Ask the command to end, by the end of its input or SIGTERM, and after so many seconds end
        all of the group by force."""
        self.signal(signal.SIGCONT)
        if self.stdin is None:
            self.process.terminate()
        else:
            with contextlib.suppress(OSError):  # what it did not read is lost
                self.stdin.close()
        self.exit_code(seconds)
        self.signal(signal.SIGKILL)
        self.process.wait()
        if self.stdout is not None:
            self.stdout.close()
        os.close(self._alive)


def engine_environment(threads: int) -> dict[str, str]:
    """Variables of a process in another interpreter: nothing of this one's Python, no network, so
    many threads."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": str(threads),
    }


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
