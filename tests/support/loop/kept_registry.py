"""What several tests do to an empty registry first is done once for each process of the tests, and
copied from then on: MLflow takes most of a second to publish a release."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from collections.abc import Callable, Hashable
from contextlib import closing
from pathlib import Path
from typing import Any

from draftwell.registry.connection import SQLITE
from draftwell.registry.moved import ARTIFACTS, follow_move
from draftwell.registry.store import Store


def digest(database: Path) -> str:
    return hashlib.sha256(database.read_bytes()).hexdigest()


class KeptRegistry:
    """Copies of registries, by what was done to an empty one."""

    def __init__(self, folder: Path, empty: Path):
        self.folder = folder
        self.known: dict[tuple[Hashable, ...], tuple[Path, Any]] = {}
        self.steps: dict[str, tuple[Hashable, ...]] = {digest(empty): ()}

    def after(self, store: Store, step: Hashable, work: Callable[[], Any]) -> Any:
        """What some work gives back, done or copied. A registry to which a test has done something
        else meanwhile is never copied."""
        database = Path(store.uri.removeprefix(SQLITE))
        before = self.steps.get(digest(database))
        if before is None:
            return work()
        steps = (*before, step)
        if steps not in self.known:
            result, kept = work(), self.folder / str(len(self.known))
            shutil.copytree(database.parent, kept)
            self.known[steps] = kept, result
        else:
            kept, result = self.known[steps]
            with (
                closing(sqlite3.connect(kept / database.name)) as source,
                closing(sqlite3.connect(database)) as target,
            ):
                source.backup(target)
            old, new = kept / ARTIFACTS, database.parent / ARTIFACTS
            shutil.copytree(old, new, dirs_exist_ok=True)
            follow_move(database)
        self.steps[digest(database)] = steps
        return result
