"""Noticing a new bundle: the link `current` leads elsewhere, a manifest was replaced, or somebody sent SIGHUP."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from serving.bundle.bundle import MANIFEST

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0
"""Seconds before a bundle is reported again that could not be taken; each pause is twice the one before."""

Mark = tuple[str, int, int, int]


class BundleWatch:
    """Looks at a bundle's place every second, on a thread of its own, and reports what it has not seen yet.

    Args:
        bundle: a bundle's folder or a link to it. Where it is a folder to which a link `current` beside it leads, that link is
            followed: `--bundle dist/pair/7-cpu` goes on to 8-cpu when `current` does.
        changed: called with the folder that is to be served, on this object's thread; a change during a call is reported afterwards.
            Where it returns False, the bundle is reported again after a while.
    """

    def __init__(self, bundle: Path, changed: Callable[[Path], object], *, seconds: float = POLL_SECONDS):
        self.place, self._changed, self._seconds = followed(bundle), changed, seconds
        self._seen = mark(self.place)
        self._asked = False
        self._pause, self._again_at = FIRST_PAUSE, math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftwell-bundles", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def ask(self) -> None:
        """Report the bundle at the next look even if it is the same. Takes no lock: signal handlers may call it."""
        self._asked = True

    def close(self) -> None:
        """Look no more; a report that is under way is not waited for."""
        self._over.set()

    def look(self) -> None:
        """Report what is new."""
        found, asked = mark(self.place), self._asked
        new = asked or found != self._seen
        if (found is None and not asked) or not (new or time.monotonic() >= self._again_at):  # between two states there may be no bundle
            return
        self._pause = FIRST_PAUSE if new else min(2 * self._pause, LONGEST_PAUSE)
        self._seen, self._asked, self._again_at = found, False, math.inf
        if self._changed(Path(found[0]) if found else self.place) is False:
            self._again_at = time.monotonic() + self._pause

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self.look()
            except Exception:
                log.exception("looking for a new bundle failed")


def followed(bundle: Path) -> Path:
    """The path to watch: the bundle's own, or the link `current` beside it where that leads to it."""
    current = bundle.absolute().parent / "current"
    if not bundle.is_symlink() and current.is_symlink() and current.resolve() == bundle.resolve():
        return current
    return bundle.absolute()


def mark(place: Path) -> Mark | None:
    """What a bundle is recognised by: where it really is, and its manifest's inode, size and date; None without one."""
    try:
        folder = place.resolve(strict=True)
        stat = (folder / MANIFEST).stat()
    except OSError:
        return None
    return str(folder), stat.st_ino, stat.st_size, stat.st_mtime_ns
