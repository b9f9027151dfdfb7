"""Removing old bundles: what is served and the newest ones stay, so that a rollback has something
to link; others can be built again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from draftwell.registry.bundles.places import NAME, UNFINISHED
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock

KEEP = 3


def prune(home: Path, keep: int = KEEP) -> list[Path]:
    """Remove bundles of a pair, but what `current` leads to and the newest of each device. No
    deployment runs meanwhile.

    Args:
        home: folder of the pair's bundles, such as `dist/smollm2-135m`.
        keep: bundles of each device that stay besides the one that is served, 1 or more: the newest
            releases, and the newest build of each.
    Returns:
        what was removed, the oldest first; nothing where there is no such folder.
    Raises:
        DraftwellError: `keep` is below 1 (`bad_value`).
    """
    if keep < 1:
        raise DraftwellError(
            f"--keep {keep}: keep 1 bundle at least, or a rollback has none to go to",
            code="bad_value",
        )
    if not home.is_dir():
        return []
    with file_lock(home):
        served = (home / "current").resolve()
        found: dict[str, list[tuple[int, int, Path]]] = {}
        for path in home.iterdir():
            if (name := NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
                found.setdefault(name[2], []).append((int(name[1]), int(name[3] or 1), path))
        old = sorted(
            entry
            for of_device in found.values()
            for entry in sorted(entry for entry in of_device if entry[2].resolve() != served)[
                :-keep
            ]
        )
        for _, _, path in old:
            # whole or away, and the next deployment removes what a kill leaves
            gone = home / f"{UNFINISHED}{path.name}"
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)
    return [path for _, _, path in old]
