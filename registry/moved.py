"""A registry in a SQLite file whose folder was renamed, moved or copied: MLflow's database names
its files by absolute paths, which then lead to the old place, or nowhere."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

ARTIFACTS = "artifacts"
"""Folder of all files, beside the database."""
COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Where MLflow keeps paths."""


def follow_move(database: Path) -> None:
    """Let a database name the files beside it, where it names those of a folder that it lay in
    before. A database that may only be read stays as it is."""
    root = database.absolute().parent / ARTIFACTS
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(database)) as connection,
        connection,  # a transaction
    ):
        found = connection.execute("SELECT artifact_location FROM experiments")
        places = {Path(location or "") for (location,) in found}
        for old in {place.parent for place in places if _was_moved(place, root)}:
            for table, column in COLUMNS:
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                    f"WHERE substr({column}, 1, ?) = ?",
                    (str(root), len(str(old)) + 1, len(str(old)) + 1, f"{old}/"),
                )


def _was_moved(place: Path, root: Path) -> bool:
    """Whether an experiment's folder lay beside the database at its old place, and is here now."""
    here = root / place.name
    if not (place.is_absolute() and place.parent.name == ARTIFACTS and here.is_dir()):
        return False
    return not place.exists() or not place.samefile(here)
