"""What whoever installs a bundle has changed in it (`FREE`), kept in the bundle that follows."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

from draftwell.registry.bundles.vllm.render import FREE, MANIFEST
from draftwell.registry.bundles.vllm.settings import VllmServing
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically

MADE_BY_USERS = (".env",)
"""Those of `FREE` that no bundle is rendered with."""


def keep_edits(old: Path, new: Path) -> list[str]:
    """Copy the files that a user has made or changed in a bundle into the one that follows it;
    returns their names.

    The name of the bundle's own image, which holds its number, becomes the new one. A file that the
    new bundle does not have, because it describes no containers, is left out, and so is one that
    was changed there already.

    Args:
        old, new: folders of bundles.
    Raises:
        DraftwellError: one cannot be read (`unreadable_file`); those before it were copied.
    """
    names = []
    try:
        before, fresh = (json.loads((one / MANIFEST).read_bytes()) for one in (old, new))
        image = VllmServing.model_validate(fresh["settings"]).name
        for name in FREE:
            if "free" not in before and name not in MADE_BY_USERS:
                continue  # an earlier version's: what it rendered is not known
            theirs, ours = _read(old / name), _read(new / name)
            rendered = fresh["free"].get(name)
            unused = rendered is None and name not in MADE_BY_USERS
            if theirs is None or _digest(theirs) == before.get("free", {}).get(name):
                continue
            if unused or _digest(ours) != rendered:
                continue
            moved = theirs.replace(f"{image}:{old.name}".encode(), f"{image}:{new.name}".encode())
            if moved != ours:
                mode = stat.S_IMODE((old / name).stat().st_mode)
                write_atomically(new / name, moved, mode=mode)
                names.append(name)
    except OSError as error:
        raise DraftwellError(
            f"cannot read {error.filename} ({error.strerror}), which is to be kept in {new}: let "
            "this user read it",
            code="unreadable_file",
        ) from error
    return names


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def _read(file: Path) -> bytes | None:
    """A file's content; None where there is none."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
