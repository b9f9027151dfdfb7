"""Removing old bundles: what is served and the newest ones stay, so that a rollback has something
to link; others can be built again."""

from __future__ import annotations

from pathlib import Path

from draftwell.registry.bundles.places import UNFINISHED, standing
from draftwell.serving.device import DEVICES
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, remove_folder

KEEP = 3


def prune(home: Path, keep: int = KEEP, *, dry_run: bool = False) -> list[Path]:
    """Remove bundles of a pair, but what `current` leads to and the newest of each device. No
    deployment runs meanwhile.

    Args:
        home: folder of the pair's bundles, such as `dist/smollm2-135m`.
        keep: bundles of each device that stay besides the one that is served, 1 or more: the newest
            releases, and the newest build of each.
        dry_run: only find what would be removed.
    Returns:
        what was removed, the oldest first; nothing where there is no such folder.
    Raises:
        DraftwellError: `keep` is below 1 (`bad_value`).
    """
    if keep < 1:
        raise DraftwellError(
            f"keep {keep}: keep 1 bundle at least, or a rollback has none to go to",
            code="bad_value",
        )
    if not home.is_dir():
        return []
    with file_lock(home):
        served = (home / "current").resolve()
        old = []
        for device in DEVICES:
            others = [one for one in standing(home, device) if one.path.resolve() != served]
            old += others[:-keep]
        removed = [one.path for one in sorted(old)]
        for path in () if dry_run else removed:
            # the next deployment removes what a kill leaves
            remove_folder(path, home / f"{UNFINISHED}{path.name}")
    return removed
