"""Files of acceptance in a folder: one a day and process, one JSON object a line, as `draftwell
monitor --engine vllm` reads them.

A line is a minute or more with traffic. It is written in one call, so that a reader sees whole
lines but for the last. Whatever goes wrong with the folder never reaches vLLM: it is logged once,
and lines are dropped. (Files named `.jsonl` in a spool are request bodies.)
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

VERSION = 1
BUNDLE = "DRAFTWELL_BUNDLE"
"""Variable with the bundle that is served."""
SECONDS = 60.0
KEEP = 400
"""Files that stay; the oldest are removed."""
NAME = re.compile(r"acceptance-\d{8}-[A-Za-z0-9.-]+-\d+\.ndjson")

log = logging.getLogger("vllm.draftwell")


@dataclass
class Counts:
    """Sums since `begun`, in seconds since 1970.

    Args:
        rounds: drafts that were verified.
        drafted, accepted: their tokens, and those that the target kept.
        accepted_at: drafts whose token at each position was kept.
        tokens: that were generated.
        requests: that ended.
        running: most requests that were decoded at once.
    """

    begun: float
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    tokens: int = 0
    requests: int = 0
    running: int = 0


class AcceptanceSpool:
    """Sums of a minute, written when it is over.

    Args:
        folder: made where it is missing.
        about: what every line says of the engine and its settings.
        seconds: of a line, at least.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], seconds: float = SECONDS):
        self.folder, self.about, self.seconds = folder, dict(about), seconds
        self._counts: Counts | None = None
        self._complained = False

    def add(self, *, accepted_at: Sequence[int] = (), running: int = 0, **counts: int) -> None:
        """Count one step of the engine.

        Args:
            accepted_at: drafts whose token at each position was kept.
            running: requests that were decoded at once.
            counts: further fields of `Counts`.
        """
        now = self._counts = self._counts or Counts(begun=time.time())
        for name, count in counts.items():
            setattr(now, name, getattr(now, name) + count)
        now.accepted_at += [0] * (len(accepted_at) - len(now.accepted_at))
        for i, count in enumerate(accepted_at):
            now.accepted_at[i] += count
        now.running = max(now.running, running)

    def write_if_due(self) -> None:
        """Write what was counted, if it began long enough ago."""
        if self._counts is not None and time.time() - self._counts.begun >= self.seconds:
            self.write()

    def write(self) -> None:
        """Write what was counted, if anything was."""
        counts, self._counts = self._counts, None
        if counts is None:
            return
        now = time.time()
        times = {"begun": round(counts.begun, 3), "seconds": round(now - counts.begun, 3)}
        line = {"version": VERSION, **self.about, **asdict(counts), **times}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (
                self.folder
                / f"acceptance-{datetime.fromtimestamp(now, UTC):%Y%m%d}-{host()}-{os.getpid()}.ndjson"  # noqa: E501
            )
            new = not file.exists()
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(handle, (json.dumps(line) + "\n").encode())
            finally:
                os.close(handle)
            if new:
                self._remove_old()
        except OSError as error:
            if not self._complained:
                self._complained = True
                log.warning("acceptance is not recorded: %s: %s", self.folder, error)

    def _remove_old(self) -> None:
        # names begin with the day
        files = sorted(path for path in self.folder.iterdir() if NAME.fullmatch(path.name))
        for path in files[:-KEEP]:
            path.unlink(missing_ok=True)


def host() -> str:
    """This machine's or container's name, as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()) or "host"
