"""Servers in processes of their own, of which only one runs at a time: the others are stopped
(SIGSTOP) meanwhile."""

from __future__ import annotations

import json
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from draftwell.components.engines.process_group import (
    END_SECONDS,
    START_SECONDS,
    ProcessGroup,
    free_port,
)
from draftwell.serving.bundle.bundle import Bundle
from draftwell.serving.errors import DraftwellError

POLL_SECONDS = 0.2
CONTEXT = 4352
"""Positions of a request, where the model has so many."""


def context_of(target: Path) -> int:
    """Positions that servers are started with for a target."""
    config = json.loads((target / "config.json").read_text())
    return min(CONTEXT, config.get("max_position_embeddings", CONTEXT))


def own_command(bundle: Bundle, slots: int, context: int, prefix_caching: str) -> list[str]:
    """What starts our server from a bundle.

    Args:
        prefix_caching: as its option says.
    """
    return [
        sys.executable,
        "-m",
        "draftwell.serving.server.main",
        "--bundle",
        str(bundle.path),
        "--slots",
        str(slots),
        "--max-context",
        str(context),
        "--prefix-caching",
        prefix_caching,
    ]


class Server:
    """A server on a port of this machine. If this process is killed, it ends with all that it has
    started.

    Args:
        label: its row in the table.
        command: starts it; `--port` is added.
        log: file for all that it prints.
        end_seconds: that it has to end when it is asked to.
    Raises:
        DraftwellError: it ended, or did not answer in time (`server_failed`, or what
            `failures.why_ended` finds).
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        end_seconds: float = END_SECONDS,
    ):
        self.label, self.log, self.end_seconds = label, log, end_seconds
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.group = ProcessGroup(
            f"the server {label}", [*command, "--port", str(port)], log, env=env
        )
        try:
            self.model = self._wait(time.monotonic() + START_SECONDS)
        except BaseException:
            self.close()
            raise
        self.group.signal(signal.SIGSTOP)

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
                            f"{refusal.code} ({refusal.reason}): see {self.log}",
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
            DraftwellError: it ended (`server_failed`, or what `failures.why_ended` finds).
        """
        if self.group.exit_code(seconds) is not None:
            raise self.group.why_ended("server_failed")

    def post(self, path: str, body: Mapping[str, Any], seconds: float) -> HTTPResponse:
        """The answer to a request, to be read and closed.

        Args:
            body: besides the model's name.
            seconds: that it is waited for.
        Raises:
            DraftwellError: the server refused it (`server_failed`).
            OSError: it could not be reached, or did not answer in time.
        """
        data = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(
            f"{self.url}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            answer: HTTPResponse = urllib.request.urlopen(request, timeout=seconds)
        except urllib.error.HTTPError as refusal:
            with refusal:
                why = refusal.read(300).decode(errors="replace")
            raise DraftwellError(f"HTTP {refusal.code}: {why}", code="server_failed") from None
        return answer

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run inside the block."""
        self.group.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.group.signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ask it to end, and end it by force with all processes that it has started."""
        self.group.end(self.end_seconds)
