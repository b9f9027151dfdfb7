"""A distillation that kills its own process: `python -m tests.components.distil.distil_child FOLDER
[WHAT WHEN COUNT]`.

WHAT is the beginning of a file's name, WHEN is `before` or `behind` its rename, COUNT says at which
one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from draftwell.components.distil.distil import distil_draft
from draftwell.components.distil.training import Recipe
from draftwell.serving.artifacts.base import digest_of
from tests.support.models.families import tiny_source


def die_at(what: str, when: str, count: int) -> None:
    """Kill this process, as `kill -9` does, at the rename with that number of files named so."""
    rename, seen = os.replace, 0

    def replace(source: Any, to: Any) -> None:
        nonlocal seen
        seen += Path(to).name.startswith(what)
        if when == "before" and seen == count:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, to)
        if when == "behind" and seen == count:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace  # type: ignore[assignment]


def main(folder: Path, *point: str) -> None:
    if point:
        die_at(point[0], point[1], int(point[2]))
    recipe = Recipe(
        layers=(0, 3),
        head_tokens=48,
        tokens=6000,
        batch_tokens=256,
        warmup_steps=5,
        peak_rate=5e-3,
        save_seconds=0.0,
        measure_steps=7,
    )
    _, report = distil_draft(tiny_source("llama"), recipe, folder, say=lambda line: None)
    print(
        digest_of(folder / "candidate"),
        report["steps"],
        report["agreement"]["agreement"],
        report["curves"],
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
