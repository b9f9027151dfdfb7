"""What was measured, in a file that is written after every measurement, so that one that was killed
resumes with the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftwell.components.bench.engines.measure import Beside
from draftwell.serving.files import json_digest, write_atomically

SCHEMA = 3


class Measurements:
    """Finished measurements by name.

    Args:
        file: JSON, written atomically after every measurement; None remembers nothing beyond this
            object.
        subject: what they depend on, as plain JSON (models, version, machine, prompts); a file of
            another subject is replaced.
        fresh: start without those that are in the file.
    """

    def __init__(self, file: Path | None, subject: Mapping[str, Any], *, fresh: bool = False):
        self.file, self.subject = file, json_digest({"schema": SCHEMA, **subject})
        self.found: dict[str, Beside] = {} if fresh else self._read()
        self.read = len(self.found)
        """How many were there at the start."""

    def get(self, name: str, measure: Callable[[], Beside]) -> Beside:
        """The measurement of this name, made where it is missing and then written."""
        if name not in self.found:
            self.put(name, measure())
        return self.found[name]

    def put(self, name: str, made: Beside) -> None:
        """Keep a measurement."""
        self.found[name] = made
        if self.file is not None:
            rows = {name: one.model_dump() for name, one in self.found.items()}
            write_atomically(
                self.file, json.dumps({"subject": self.subject, "measurements": rows}).encode()
            )

    def _read(self) -> dict[str, Beside]:
        try:
            known = json.loads(self.file.read_text()) if self.file is not None else {}
            if known.get("subject") != self.subject:
                return {}
            return {
                name: Beside.model_validate_json(json.dumps(row))
                for name, row in known["measurements"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ValidationError):
            return {}  # no file, or not one of ours: it can be measured again
