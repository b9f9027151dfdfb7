"""A distillation that kills its own process: `python -m tests.components.distil.distil_child FOLDER
[WHAT WHEN COUNT]`.

WHAT is the beginning of a file's name, WHEN is `before` or `behind` its rename, COUNT says at which
one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from draftwell.components.distil.distil import distil_draft
from draftwell.components.distil.training import Recipe
from draftwell.serving.artifacts.base import digest_of
from tests.support.killing import deadly
from tests.support.models.families import tiny_source


def main(folder: Path, *point: str) -> None:
    if point:
        os.replace = deadly(
            os.replace,
            int(point[2]),
            after=point[1] == "behind",
            counts=lambda source, to: Path(to).name.startswith(point[0]),
        )
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
