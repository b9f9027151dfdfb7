"""What whoever installs a bundle has changed in it (`FREE`), kept in the bundle that follows."""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import dataclass
from pathlib import Path

from draftwell.registry.bundles.vllm.render import FREE, MANIFEST
from draftwell.registry.bundles.vllm.settings import VllmServing
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically

MADE_BY_USERS = (".env",)
"""Those of `FREE` that no bundle is rendered with."""


@dataclass(frozen=True)
class Kept:
    """What became of a user's files.

    Args:
        names: of the files that were copied.
        unknown: names of files that may have been changed and were not copied, because the old
            bundle is of a version that did not write down what it rendered: they cannot be told
            from those of that version's templates.
    """

    names: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def keep_edits(old: Path, new: Path) -> Kept:
    """Copy the files that a user has made or changed in a bundle into the one that follows it.

    The name of the bundle's own image, which holds its number, becomes the new one. A file that the
    new bundle does not have, because it describes no containers, is left out, and so is one that
    was changed there already.

    Args:
        old, new: folders of bundles.
    Raises:
        DraftwellError: one cannot be read (`unreadable_file`); those before it were copied.
    """
    before, fresh = _digests(old), _digests(new) or {}
    image = VllmServing.model_validate(json.loads((new / MANIFEST).read_bytes())["settings"]).name
    names, unknown = [], []
    for name in FREE:
        try:
            data = _read(old / name)
            mine = _read(new / name)
        except OSError as error:
            raise DraftwellError(
                (
                    f"cannot read {error.filename} ({error.strerror}), which is to be kept in "
                    f"{new}: let this user read it"
                ),
                code="unreadable_file",
            ) from error
        wanted = (
            mine is None
            if name in MADE_BY_USERS
            else mine is not None and _digest(mine) == fresh.get(name)
        )
        if data is None or not wanted:
            continue
        mode = stat.S_IMODE((old / name).stat().st_mode)
        moved = data.replace(f"{image}:{old.name}".encode(), f"{image}:{new.name}".encode())
        if moved == mine or (before is not None and _digest(data) == before.get(name)):
            continue
        if before is None and name not in MADE_BY_USERS:
            unknown.append(name)
            continue
        write_atomically(new / name, moved, mode=mode)
        names.append(name)
    return Kept(tuple(names), tuple(unknown))


def _digests(bundle: Path) -> dict[str, str | None] | None:
    """Name → sha256 of a bundle's files as they were rendered; None for one of a version that did
    not write them down."""
    try:
        free = json.loads((bundle / MANIFEST).read_bytes())["free"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return free if isinstance(free, dict) else None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(file: Path) -> bytes | None:
    """A file's content; None where there is none."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
