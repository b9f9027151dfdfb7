"""The store of results: a file that whatever takes long appends each finished result to, so that a
run that was killed resumes with the next.

The file is JSON lines. The first line names the *subject*: a digest of all that the results depend
on. A file of another subject is begun again, or refused where a person named it. Each further line
is a result with its key; of two with one key the later counts. A line that a kill cut short is not
read, and the next one begins behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, sync, write_atomically

VERSION = 1
T = TypeVar("T")


class Results(Generic[T]):
    """Results by key, in the order in which they were finished.

    Args:
        file: None remembers nothing beyond this object. It is made with the first result.
        subject: what the results depend on, as plain JSON.
        kind: of a result: a pydantic model, a dataclass, or a type such as `dict[str, Any]`.
        fresh: begin again.
        refusal: raised where the file holds something else; None begins it again.
    """

    def __init__(
        self,
        file: Path | None,
        subject: Any,
        kind: Any,
        *,
        fresh: bool = False,
        refusal: DraftwellError | None = None,
    ):
        self.file, self.subject = file, json_digest(subject)
        self._head = {"draftwell": "results", "version": VERSION, "subject": self.subject}
        self._kind: TypeAdapter[T] = TypeAdapter(kind)
        self._found: dict[str, T] = {}
        self._begun = False
        if not fresh:
            self._read(refusal)
        self.read = len(self._found)
        """How many were there at the start."""

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> T:
        return self._found[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def items(self) -> list[tuple[str, T]]:
        """Keys and results."""
        return list(self._found.items())

    def get(self, key: str, make: Callable[[], T]) -> T:
        """The result of this key, made where it is missing and then kept."""
        if key not in self._found:
            self.put(key, make())
        return self._found[key]

    def put(self, key: str, result: T) -> None:
        """Keep a result: it is on disk before this returns."""
        value = self._kind.dump_python(result, mode="json", exclude_unset=True)
        line = json.dumps({"key": key, "value": value}, allow_nan=False) + "\n"
        self._found[key] = result
        if self.file is None:
            return
        if not self._begun:
            write_atomically(self.file, (json.dumps(self._head) + "\n").encode())
            self._begun = True
        with self.file.open("ab+") as file:
            file.seek(-1, 2)
            # after a line that was cut short
            file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write(line.encode())
        sync(self.file)

    def _read(self, refusal: DraftwellError | None) -> None:
        try:
            head, *lines = self.file.read_bytes().split(b"\n") if self.file else [b""]
        except FileNotFoundError:
            return
        if not head and not any(lines):
            return
        if object_of(head) != self._head:
            if refusal is not None:
                raise refusal
            return
        self._begun = True
        for row in map(object_of, lines):
            if not isinstance(key := row.get("key"), str):
                continue  # cut short, or not one of ours: it is made again
            try:
                self._found[key] = self._kind.validate_json(json.dumps(row["value"]))
            except (KeyError, RecursionError, ValidationError):
                continue


def object_of(line: bytes) -> dict[str, Any]:
    """A line's object; empty where it holds none, as one that was cut short.

    >>> object_of(b'{"a": 1}'), object_of(b'{"a": ')
    ({'a': 1}, {})
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
