"""Studies: what a tuning has tried, kept by Optuna in one SQLite file, a study for each strategy.

A study is bound to its *description*: everything that its values depend on, as plain JSON. The description's digest is part of
the study's name, so trials of another space or trace are never mixed with these. A file that the user named must hold no
other description of the same strategy; the default file may, because there they are older tunings only.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import DraftwellError
from serving.files import json_digest

if TYPE_CHECKING:
    import optuna

Description = Mapping[str, Any]

DESCRIPTION = "draftwell"
"""Attribute of Optuna's study that holds its description."""
OBJECTIVES = ("predicted_seconds_per_token", "target_calls_per_token", "divergence")
"""What is minimised, in this order."""


class Studies:
    """The studies of one tuning.

    Args:
        file: SQLite file, created if it does not exist; None keeps trials in memory.
        seed: of the samplers.
        named: whether the user chose the file (see the module's first lines).
    """

    def __init__(self, file: Path | None, seed: int = 0, *, named: bool = False):
        self.optuna = import_optuna()
        self.file, self.seed, self.named = file, seed, named
        self._storage: Any = None

    def check(self, descriptions: Mapping[str, Description]) -> None:
        """Refuse a file that is no study file, or one that the user named and that holds another search; nothing is written.

        Args:
            descriptions: strategy → what is to be searched.
        """
        if self.file is None or not self.file.exists():
            return
        known = self._recorded(self.file)
        for name, recorded in known.items() if self.named else ():
            strategy = name.rpartition("-")[0]
            wanted = descriptions.get(strategy)
            if wanted is not None and name != study_name(strategy, wanted):
                raise DraftwellError(f"the study {self.file} is of another search, the {difference(recorded, wanted)} of {strategy} "
                                     "differ: name another file with --study, or leave --study out", code="study_of_another_search")

    def open(self, strategy: str, description: Description) -> optuna.Study:
        """A strategy's study, continued or new."""
        if self._storage is None and self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._storage = self.optuna.storages.RDBStorage(f"sqlite:///{self.file}")
        study = self.optuna.create_study(storage=self._storage, study_name=study_name(strategy, description), load_if_exists=True,
                                         directions=["minimize"] * len(OBJECTIVES), sampler=self.optuna.samplers.TPESampler(seed=self.seed))
        if DESCRIPTION not in study.user_attrs:
            study.set_user_attr(DESCRIPTION, dict(description))
        return study

    def close(self) -> None:
        """Close the file."""
        if self._storage is not None:
            self._storage.remove_session()
            self._storage.engine.dispose()
            self._storage = None

    def _recorded(self, file: Path) -> dict[str, Description]:
        """Study name → description of every study in a file. Optuna writes to what it opens, so it is given a copy."""
        with readable_copy(file) as copy:
            try:
                check_tables(copy)
                storage = self.optuna.storages.RDBStorage(f"sqlite:///{copy}")
                try:
                    found = self.optuna.get_all_study_summaries(storage, include_best_trial=False)
                finally:
                    storage.remove_session()
                    storage.engine.dispose()
            except unreadable() as error:
                raise DraftwellError(f"{file} is not a study file of Draftwell: name another with --study, or move it away",
                                     code="not_a_study") from error
        return {study.study_name: study.user_attrs.get(DESCRIPTION, {}) for study in found}


def import_optuna() -> Any:
    """Optuna, quiet."""
    try:
        import optuna
    except ImportError as error:
        raise DraftwellError("tuning needs the package optuna: pip install 'draftwell[pipeline]'", code="missing_extra") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def unreadable() -> tuple[type[Exception], ...]:
    """What is raised for a file that is not SQLite, is broken, is another program's, or is of an Optuna that this one cannot read."""
    from sqlalchemy.exc import SQLAlchemyError

    return sqlite3.Error, SQLAlchemyError, RuntimeError, ValueError


@contextmanager
def readable_copy(file: Path) -> Iterator[Path]:
    """A copy of a SQLite file, with the journal that a killed process may have left."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "study.db"
        for source, target in ((file, copy), (Path(f"{file}-journal"), Path(f"{copy}-journal"))):
            if source.is_file():
                shutil.copyfile(source, target)
        yield copy


def check_tables(file: Path) -> None:
    """Refuse a database that is neither empty nor Optuna's, before Optuna adds its tables to it."""
    connection = sqlite3.connect(file)
    try:
        tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    finally:
        connection.close()
    if tables and "studies" not in tables:
        raise ValueError("a database of something else")


def study_name(strategy: str, description: Description) -> str:
    """The strategy, and a digest of the description."""
    return f"{strategy}-{json_digest(description)[:16]}"


def difference(recorded: Description, wanted: Description) -> str:
    """The first key in which two descriptions differ."""
    return next((key for key in wanted if recorded.get(key) != wanted[key]), "settings")
