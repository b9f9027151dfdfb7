"""Files and folders that are whole or not there, digests, and locks between processes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old content or the new, never half of it; `mode` says
    who may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> Path:
    """Write a text atomically."""
    write_atomically(path, text.encode())
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write indented JSON atomically; returns the path."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())
    return path


def is_left_over(name: str, of: str) -> bool:
    """Whether a file is what `write_atomically` leaves next to the file `of` while it writes, or
    where it is killed."""
    # mkstemp's characters
    return re.fullmatch(rf"\.{re.escape(of)}\.[a-z0-9_]{{8}}", name) is not None


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`; a kill at any moment leaves the old or the new one whole,
    here or just next to."""
    if not folder.exists():
        os.replace(new, folder)
        return
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old."))
    os.replace(folder, old / folder.name)
    try:
        os.replace(new, folder)
    except BaseException:
        os.replace(old / folder.name, folder)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file or folder against other processes; the system releases it when the
    process ends, however that happens.

    Args:
        path: a folder that exists, or a file, which is created with its folder where it is missing.
        wait: wait for another holder; otherwise the value says whether the lock was free.
    Yields:
        whether this process holds the lock.
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
        yield True
    finally:
        os.close(handle)
