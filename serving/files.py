"""Files and folders that are whole or not there, digests, and locks between processes.

Nothing else in the project renames or links: what takes another's place is written beside it,
synced, renamed, and the folder's names are synced, so that a kill or a loss of power at any moment
leaves the old one or the new one, and what a command has reported stays.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Linux: paths are as usual; two files change places."""
UNABLE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""What file systems answer that cannot do what they are asked for."""
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""What they answer where something is in the place of a folder."""


MOST_TEXT = 2**28
"""Bytes of a text that a person names: more is a device without an end, or no text."""


def read_text(path: Path) -> str:
    """A UTF-8 text that a person names, also from a pipe.

    Raises:
        OSError: it cannot be read, or is longer than `MOST_TEXT`.
        UnicodeDecodeError: it is not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(MOST_TEXT + 1)
    if len(data) > MOST_TEXT:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data.decode("utf-8")


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def json_digest(value: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """Hex sha256 of a value's JSON with sorted keys: equal values have equal digests.

    Args:
        default: makes JSON of what json does not know, as in `json.dumps`.

    >>> json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=default).encode()).hexdigest()


def sync(path: Path) -> None:
    """Let a file's content, or the names in a folder, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNABLE:
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """`sync` a folder with all that is in it."""
    for place, _, files in os.walk(folder, topdown=False):
        for file in (Path(place, name) for name in files):
            if not file.is_symlink():
                sync(file)
        sync(Path(place))


def make_folder(folder: Path, mode: int = 0o777) -> Path:
    """Make a folder, and those above it, where they are missing; returns it."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(mode, parents=True, exist_ok=True)
    for place in missing:
        sync(place.parent)
    return folder


def move_file(file: Path, path: Path) -> None:
    """Put a finished file in a place of the same file system, on disk."""
    sync(file)
    os.replace(file, path)
    sync(path.parent)


def put_file(path: Path, write: Callable[[Path], object], *, mode: int = 0o644) -> Path:
    """Write a file so that a reader sees the old content or the new, never half of it, and that the
    new one is on disk when this returns; returns its path.

    Args:
        write: writes the content into the file that it is given.
        mode: who may read it.
    """
    make_folder(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, mode)
        move_file(Path(name), path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """`put_file` of these bytes."""
    put_file(path, lambda file: file.write_bytes(data), mode=mode)


def write_text(path: Path, text: str) -> Path:
    """Write a text atomically."""
    write_atomically(path, text.encode())
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write indented JSON atomically; returns the path."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())
    return path


def is_left_over(name: str, of: str) -> bool:
    """Whether a file is what `put_file` leaves next to the file `of` while it writes, or where it
    is killed."""
    # mkstemp's characters
    return re.fullmatch(rf"\.{re.escape(of)}\.[a-z0-9_]{{8}}", name) is not None


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `folder` when all is written and on
    disk; after an error, `folder` is as it was. All may read what is in it."""
    make_folder(folder.parent)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True
    ) as name:
        place = Path(name)
        yield place
        place.chmod(0o755)
        for path in place.iterdir():
            path.chmod(path.stat().st_mode | 0o644)  # safetensors writes files for their owner only
        put_folder(place, folder)


def put_folder(new: Path, folder: Path) -> None:
    """Put the finished folder `new` in the place of `folder`, on disk; an old one ends at `new`, or
    is removed.

    At every moment the old or the new one is there, whole. But where the file system cannot let two
    folders change places (NFS), a kill may leave the old one just next to its place: `put_back`.
    """
    sync_tree(new)
    try:
        os.replace(new, folder)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        _take_place(new, folder)
    sync(folder.parent)
    shutil.rmtree(set_aside(folder), ignore_errors=True)


def _take_place(new: Path, folder: Path) -> None:
    """Put a folder in the place of one that is there."""
    if not _exchange(new, folder):
        old = set_aside(folder)
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
        try:
            os.replace(new, folder)
        except BaseException:
            os.replace(old, folder)
            raise


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux only
    if renameat2 is None:
        return False
    if not renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def set_aside(folder: Path) -> Path:
    """Where the old folder is while another takes its place in two steps."""
    return folder.with_name(f".{folder.name}.old")


def put_back(home: Path) -> None:
    """Put the folders in `home` back that a killed `put_folder` has left set aside."""
    for old in home.glob(".*.old"):
        folder = home / old.name[1 : -len(".old")]
        if set_aside(folder) == old and not folder.exists():
            os.replace(old, folder)
            sync(home)


def remove_folder(folder: Path, aside: Path) -> None:
    """Remove a folder, which is whole or away at every moment; `aside` is its name meanwhile."""
    os.replace(folder, aside)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def write_link(path: Path, to: Path | str) -> None:
    """Let `path` be a link to a folder from now on, on disk."""
    make_folder(path.parent)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    os.symlink(to, new, target_is_directory=True)
    try:
        os.replace(new, path)
    except BaseException:
        new.unlink()
        raise
    sync(path.parent)


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file or folder against other processes; the system releases it when the
    process ends, however that happens.

    Args:
        path: a folder that exists, or a file, which is created with its folder where it is missing.
        wait: wait for another holder; otherwise the value says whether the lock was free.
    Yields:
        whether this process holds the lock; also where the file system has no locks, with a
        warning.
    """
    import fcntl  # POSIX only, so not at import

    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in (errno.ENOLCK, *UNABLE):
                raise
            log.warning("%s cannot be locked (%s): let no other process use it", path, error)
        yield True
    finally:
        os.close(handle)
