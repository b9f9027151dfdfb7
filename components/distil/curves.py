"""What a training logs by step, kept beside its checkpoint: a run that resumes has the steps of
before, too."""

from __future__ import annotations

import json
from pathlib import Path

from draftwell.components.distil.checkpoint import CHECKPOINT

Curve = list[tuple[int, float]]
"""Pairs of step and value, ascending."""


class Curves:
    """The curves of the training whose checkpoint is in a folder; without a checkpoint they begin
    again.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path):
        self.file = folder / "curves.jsonl"
        if not (folder / CHECKPOINT).is_file():
            self.file.unlink(missing_ok=True)

    def add(self, name: str, value: float, step: int) -> None:
        """Keep one value."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([name, step, value]) + "\n")

    def read(self) -> dict[str, Curve]:
        """name → its curve. Of steps that ran twice, as after a kill, the second values; a line
        that a kill cut short is left out."""
        found: dict[str, dict[int, float]] = {}
        for line in (
            self.file.read_text(encoding="utf-8").splitlines() if self.file.is_file() else []
        ):
            try:
                name, step, value = json.loads(line)
            except ValueError:
                continue
            found.setdefault(name, {})[step] = value
        return {name: sorted(values.items()) for name, values in found.items()}
