"""Where the library of the layers is kept (`serving/runtime/models/native`): as
`<folder>/<key>/<sha256>.so`, where the key stands for the kind of machine and the code, and the
file's name is its digest.

A bundle brings along, in its folder `compiled/`, the one of the machine that built it.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path

from draftwell.serving.errors import DraftwellError

COMPILED = "compiled"
OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""Modes with which others than a file's owner may write to it."""

log = logging.getLogger(__name__)


def libraries_folder() -> Path:
    """Where a user's machine keeps what it compiled, for all projects."""
    return _cache() / COMPILED


def own_folder(*names: str) -> Path:
    """A folder below `~/.cache/draftwell` (`$XDG_CACHE_HOME`) that nobody but this user can write
    to or read (0700), made where it is missing: what is in there is run. One of this user's that
    others may have written to, as the umask of some systems leaves it, is emptied.

    Raises:
        DraftwellError: it is a link or belongs to another user (`foreign_library`); or it cannot be
            made (`no_cache_folder`).
    """
    try:
        folder = _cache()
        folder.parent.mkdir(parents=True, exist_ok=True)
        for name in ("", *names):
            folder /= name
            folder.mkdir(mode=0o700, exist_ok=True)
            mode, owner = (found := folder.lstat()).st_mode, found.st_uid
            if owner == os.getuid() and not stat.S_ISLNK(mode):
                folder.chmod(0o700)
                if mode & OTHERS:
                    _empty(folder)
            check_own(folder)
    except (OSError, RuntimeError) as error:
        raise DraftwellError(
            f"there is no folder for what is compiled here ({error}): set XDG_CACHE_HOME to a "
            "folder of your own",
            code="no_cache_folder",
        ) from error
    return folder


def check_own(path: Path) -> None:
    """Refuse a file or folder that others than this user and root may have written.

    Raises:
        DraftwellError: as `own_folder`.
    """
    found = path.lstat()
    if (
        stat.S_ISLNK(found.st_mode)
        or found.st_mode & OTHERS
        or found.st_uid not in (0, os.getuid())
    ):
        raise DraftwellError(
            f"{path} is a link, belongs to another user, or others may write to it: delete it, or "
            "set XDG_CACHE_HOME to a folder of your own",
            code="foreign_library",
        )


def _empty(folder: Path) -> None:
    """Delete what is in a folder, which is made again where it is missing."""
    log.warning("others could write to %s: what was compiled there is made again", folder)
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def wanted_mode() -> str:
    """How commands want the library, a `native.library.Compile`: `$DRAFTWELL_COMPILE`, else
    auto."""
    return os.environ.get("DRAFTWELL_COMPILE", "auto")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftwell"
