"""Servers in processes of their own, of which only one runs at a time: the others are stopped
(SIGSTOP) meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from draftwell.components.engines.environments import GROUP_OF_PARENT
from draftwell.components.engines.failures import last_line, why_ended
from draftwell.components.engines.ports import free_port, refuse_taken
from draftwell.components.engines.process import END_SECONDS, START_SECONDS
from draftwell.serving.errors import DraftwellError

POLL_SECONDS = 0.2


class Server:
    """A server on a port of this machine. If this process is killed, it ends with all that it has
    started.

    Args:
        label: its row in the table.
        command: starts it; `--port` is added.
        log: file for all that it prints.
        port: None takes a free one.
        end_seconds: that it has to end when it is asked to.
    Raises:
        DraftwellError: it ended, or did not answer in time (`server_failed`, or what
            `failures.KNOWN` makes of its log); the port is taken (`engine_port_taken`).
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
        port: int | None = None,
        end_seconds: float = END_SECONDS,
    ):
        self.label, self.log, self.end_seconds = label, log, end_seconds
        if port is None:
            port = free_port()
        refuse_taken(port)
        self.url = f"http://127.0.0.1:{port}"
        watched = [sys.executable, "-ES", str(GROUP_OF_PARENT), *command, "--port", str(port)]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                watched,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=None if env is None else dict(env),
                process_group=0,
            )
        try:
            self.model = self._wait(time.monotonic() + start_seconds)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def _wait(self, end: float) -> str:
        """Name of the model that it serves, as soon as it answers.

        Raises:
            DraftwellError: it ended, refuses the question, or does not answer in time
                (`server_failed`).
        """
        while time.monotonic() < end:
            self.refuse_ended()
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
                    return str(json.load(answer)["data"][0]["id"])
            except urllib.error.HTTPError as refusal:
                with refusal:
                    # with which some servers answer while they load
                    if refusal.code != HTTPStatus.SERVICE_UNAVAILABLE:
                        raise DraftwellError(
                            f"the server {self.label} answers /v1/models with HTTP "
                            f"{refusal.code} ({refusal.reason}): see "
                            f"{self.log}",
                            code="server_failed",
                        ) from None
            except OSError:  # it does not listen yet
                pass
            time.sleep(POLL_SECONDS)
        raise DraftwellError(
            f"the server {self.label} does not answer: see {self.log}", code="server_failed"
        )

    def refuse_ended(self, seconds: float = 0.0) -> None:
        """Raise why it ended, if it did.

        Args:
            seconds: that it is given to end.
        Raises:
            DraftwellError: it ended (`server_failed`, or what `failures.KNOWN` makes of its log).
        """
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        error = why_ended(f"the server {self.label}", self.log, code)
        if error.code != "engine_failed":
            raise error
        raise DraftwellError(
            (
                f"the server {self.label} ended with exit code {code} ({last_line(self.log)}): "
                f"see {self.log}"
            ),
            code="server_failed",
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run inside the block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ask it to end, and end it by force with all processes that it has started."""
        self._signal(signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.end_seconds)
        self._signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
