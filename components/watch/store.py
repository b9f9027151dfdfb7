"""The watchdog's memory: samples and probes in a file of JSON lines, which is bounded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from draftwell.components.engines.remote.counters import Counters
from draftwell.components.results import object_of
from draftwell.components.watch.schema import Probe
from draftwell.serving.files import make_folder, sync, write_atomically

LARGEST = 20_000
"""Lines that are kept: two weeks of a sample a minute."""


class Series(NamedTuple):
    """What was kept, in the order in which it came."""

    samples: list[Counters]
    probes: list[Probe]


class Store:
    """A file of lines `{"sample": …}` and `{"probe": …}`, for one writer.

    A line is on disk when `add` returns. One that a kill cut short is not read, and the next begins
    behind it. When twice the bound is reached, the oldest lines go: the file is replaced at once by
    one with the newest.

    Args:
        file: made with the first line.
        largest: lines that are kept at least.
    """

    def __init__(self, file: Path, *, largest: int = LARGEST):
        self.file, self.largest = file, largest
        self._lines: int | None = None

    def add(self, *entries: Counters | Probe) -> None:
        """Append samples and probes."""
        if not entries:
            return
        if self._lines is None:
            self._lines = len(self._read())
        if self._lines + len(entries) > 2 * self.largest:
            self._compact()
        make_folder(self.file.parent)
        lines = "".join(f"{json.dumps(as_object(entry))}\n" for entry in entries)
        with self.file.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write(lines.encode())
        sync(self.file)
        self._lines += len(entries)

    def read(self) -> Series:
        """All that is kept; lines that are no entries are passed over."""
        samples: list[Counters] = []
        probes: list[Probe] = []
        for row in map(object_of, self._read()):
            try:
                if "sample" in row:
                    samples.append(Counters.model_validate_json(json.dumps(row["sample"])))
                elif "probe" in row:
                    probes.append(Probe.model_validate_json(json.dumps(row["probe"])))
            except ValidationError:
                continue
        return Series(samples, probes)

    def _read(self) -> Sequence[bytes]:
        try:
            return self.file.read_bytes().splitlines()
        except FileNotFoundError:
            return []

    def _compact(self) -> None:
        newest = [line for line in self._read() if object_of(line)][-self.largest :]
        write_atomically(self.file, b"".join(line + b"\n" for line in newest))
        self._lines = len(newest)


def as_object(entry: Counters | Probe) -> dict[str, object]:
    """An entry as it is written: what is not said is left out."""
    kind = "sample" if isinstance(entry, Counters) else "probe"
    return {kind: entry.model_dump(exclude_defaults=True)}
