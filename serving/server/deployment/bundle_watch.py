"""Noticing a new bundle: the link `current` points elsewhere, a manifest was replaced, or SIGHUP
was received."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from draftwell.serving.bundle.bundle import MANIFEST

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0
"""Seconds before a bundle that could not be loaded is reported again; each pause is twice as long
as the last."""

Mark = tuple[str, int, int, int]


class BundleWatch:
    """Checks a bundle's path every second, on its own thread, and reports a bundle that is new.

    Args:
        bundle: a bundle's folder or a link to it. If a link `current` in the same parent folder
            points to this folder, the link is followed: `--bundle dist/pair/7-cpu` switches to
            8-cpu when `current` does.
        changed: called on this object's thread with the folder to serve; a change during a call is
            reported afterwards. If it returns False, the bundle is reported again later.
    """

    def __init__(
        self, bundle: Path, changed: Callable[[Path], object], *, seconds: float = POLL_SECONDS
    ):
        self.place, self._changed, self._seconds = followed(bundle), changed, seconds
        self._seen = mark(self.place)
        self._asked = False
        self._pause, self._again_at = FIRST_PAUSE, math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftwell-bundles", daemon=True)

    def start(self) -> None:
        """Begin to check."""
        self._thread.start()

    def ask(self) -> None:
        """Report the bundle at the next check even if it is the same. Takes no lock: signal
        handlers may call it."""
        self._asked = True

    def close(self) -> None:
        """Stop checking, without waiting for a report in progress."""
        self._over.set()

    def look(self) -> None:
        """Check once, and report a new bundle."""
        found, asked = mark(self.place), self._asked
        new = asked or found != self._seen
        # during a replacement there may be no bundle
        if (found is None and not asked) or not (new or time.monotonic() >= self._again_at):
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
                log.exception("checking for a new bundle failed")


def followed(bundle: Path) -> Path:
    """The path to watch: the bundle's own, or the link `current` next to it if that points to
    it."""
    current = bundle.absolute().parent / "current"
    if not bundle.is_symlink() and current.is_symlink() and current.resolve() == bundle.resolve():
        return current
    return bundle.absolute()


def mark(place: Path) -> Mark | None:
    """Identity of a bundle: its resolved path, and its manifest's inode, size and date; None
    without one."""
    try:
        folder = place.resolve(strict=True)
        stat = (folder / MANIFEST).stat()
    except OSError:
        return None
    return str(folder), stat.st_ino, stat.st_size, stat.st_mtime_ns
