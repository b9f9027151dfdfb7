"""What a kill, or a loss of power, would leave of a folder at every step of a write.

    with crashes(folder) as left:
        act()
    for crash in left: read(crash.written(scratch))

Before each call that syncs, renames, links, makes or removes something, and at the end, three
trees are kept: what a *kill* leaves (all that was written), what a loss of power leaves that drops
all that was *not synced*, contents and names, and one that *keeps the names* and drops contents.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from draftwell.serving import files

T = TypeVar("T")
Tree = dict[str, Any]
"""Name → bytes of a file, target of a link, or the tree of a folder."""
POINTS = (
    *((os, name) for name in ("fsync", "replace", "rename", "link", "symlink", "mkdir", "unlink")),
    (files, "_exchange"),
)


@dataclass(frozen=True)
class Crash:
    """What is left of a folder.

    Args:
        when: name of the call that did not begin; None where all was done.
        how: "killed", "not synced" or "names kept".
    """

    when: str | None
    how: str
    tree: Tree

    def written(self, folder: Path) -> Path:
        """The tree as the new folder `folder`."""
        _write(self.tree, folder)
        return folder


def _write(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, entry in tree.items():
        if isinstance(entry, bytes):
            (folder / name).write_bytes(entry)
        elif isinstance(entry, str):
            (folder / name).symlink_to(entry)
        else:
            _write(entry, folder / name)


class Inode(NamedTuple):
    """A file or folder, whatever its name."""

    number: int
    is_folder: bool


class Disk:
    """What is on disk of a folder: of each file and folder, what it held when it was last synced.
    All that is there at first is."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self.synced: dict[Inode, Any] = {}
        self.handles: list[int] = []
        for place, _, names in os.walk(self.root):
            for path in (Path(place), *(Path(place, name) for name in names)):
                if not path.is_symlink():
                    self.keep(path)

    def keep(self, path: Path) -> None:
        """A file or folder was synced."""
        if not path.is_relative_to(self.root) or not path.exists():
            return
        self.handles.append(os.open(path, os.O_RDONLY))  # so that nobody else gets its inode
        self.synced[_inode(path)] = (
            {one.name: _entry(one) for one in path.iterdir()}
            if path.is_dir()
            else path.read_bytes()
        )

    def image(self, how: str, entry: Any = None) -> Any:
        """The tree that is left of the root, or of a file or folder in it."""
        if how != "not synced":
            return self._live(self.root, with_contents=how == "killed")
        entry = entry or _inode(self.root)
        if not isinstance(entry, Inode):
            return entry
        found = self.synced.get(entry, {} if entry.is_folder else b"")
        if not entry.is_folder:
            return found
        return {name: self.image(how, one) for name, one in found.items()}

    def _live(self, path: Path, *, with_contents: bool) -> Any:
        if path.is_symlink():
            return os.readlink(path)
        if path.is_dir():
            return {
                one.name: self._live(one, with_contents=with_contents) for one in path.iterdir()
            }
        return path.read_bytes() if with_contents else self.synced.get(_inode(path), b"")


def _inode(path: Path) -> Inode:
    found = path.stat()
    return Inode(found.st_ino, stat.S_ISDIR(found.st_mode))


def _entry(path: Path) -> Inode | str:
    return os.readlink(path) if path.is_symlink() else _inode(path)


@contextmanager
def crashes(root: Path, *also: tuple[object, str]) -> Iterator[list[Crash]]:
    """What would be left of `root` at each step of the block, each tree once, those of the end
    last.

    Args:
        also: object and name of further calls before which it might crash.
    """
    disk = Disk(root)
    left: list[Crash] = []

    def look(when: str | None) -> None:
        for how in ("killed", "not synced", "names kept"):
            crash = Crash(when, how, disk.image(how))
            new = all(crash.tree != other.tree for other in left)
            if new or when is None or when in {name for _, name in also}:
                left.append(crash)

    def watched(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            look(name)
            value = real(*arguments, **options)
            if name == "fsync":
                disk.keep(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
            return value

        return call

    try:
        with ExitStack() as patches:
            for module, name in (*POINTS, *also):
                real = getattr(module, name)
                patches.enter_context(patch.object(module, name, watched(real, name)))
            yield left
        look(None)
    finally:
        for handle in disk.handles:
            os.close(handle)


def outcomes(
    root: Path, act: Callable[[], object], read: Callable[[Path], T], scratch: Path
) -> tuple[set[T], set[T]]:
    """What a reader finds after a crash on the way, and after one behind the end.

    Args:
        root: all that `act` writes is in it.
        read: reads a copy of the root, in any way that a next run would.
        scratch: a new folder.
    """
    scratch.mkdir(parents=True)
    with crashes(root) as left:
        act()
    found: tuple[set[T], set[T]] = (set(), set())
    for number, crash in enumerate(left):
        found[crash.when is None].add(read(crash.written(scratch / f"crash-{number}")))
    return found
