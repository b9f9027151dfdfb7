"""The file of trials: what a tuning has tried, one JSON object a line, so that a tuning that was
killed resumes.

A trial is appended as soon as it is known. It belongs to a *description*: everything that its
values depend on, as plain JSON. So trials of another trace, table or profile are never mixed with
these, and a larger search space reuses those it shares. A file that the user named must hold no
other description of the same strategy; the default file may, because there they are older tunings
only. A line that a killed process left unfinished is not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftwell.components.tune.evidence import Trial
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, write_atomically
from draftwell.serving.runtime.strategies import StrategyChoice

Description = Mapping[str, Any]

HEAD = {"draftwell": "trials", "version": 1}
"""The first line of a file."""


class TrialLog:
    """The trials of this tuning and of earlier ones.

    Args:
        file: created with the first trial if it does not exist; None keeps trials in memory.
        named: whether the user chose the file (see the module's first lines).
    """

    def __init__(self, file: Path | None, *, named: bool = False):
        self.file, self.named = file, named
        # strategy → digest → description
        self._descriptions: dict[str, dict[str, Description]] = {}
        self._trials: dict[str, dict[StrategyChoice, Trial]] = {}  # digest → choice → trial
        self._read()

    def check(self, descriptions: Mapping[str, Description]) -> None:
        """Refuse a file that the user named and that holds another search of the same strategy;
        nothing is written.

        Args:
            descriptions: strategy → what its trials depend on.
        Raises:
            DraftwellError: it does (`study_of_another_search`).
        """
        for strategy, wanted in descriptions.items() if self.named else ():
            for digest, recorded in self._descriptions.get(strategy, {}).items():
                if digest != digest_of(strategy, wanted):
                    raise DraftwellError(
                        f"the study {self.file} is of another search, the "
                        f"{difference(recorded, wanted)} of {strategy} "
                        "differ: name another file with --study, or leave --study out",
                        code="study_of_another_search",
                    )

    def known(self, strategy: str, description: Description) -> dict[StrategyChoice, Trial]:
        """The trials of a strategy under a description, in the order in which they were added."""
        return dict(self._trials.get(digest_of(strategy, description), {}))

    def add(self, description: Description, trial: Trial) -> None:
        """Keep a trial, on disk before this returns."""
        digest, known = (
            digest_of(trial.strategy, description),
            self._descriptions.setdefault(trial.strategy, {}),
        )
        rows: list[dict[str, Any]] = []
        if digest not in known:
            known[digest] = description
            rows.append({"search": digest, "strategy": trial.strategy, "description": description})
        rows.append({"search": digest, "trial": trial.model_dump(mode="json", exclude_unset=True)})
        self._trials.setdefault(digest, {})[trial.choice] = trial
        self._append(rows)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        if self.file is None:
            return
        if not self.file.exists() or not self.file.stat().st_size:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, (json.dumps(HEAD) + "\n").encode())
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        with self.file.open("ab+") as file:
            file.seek(-1, 2)
            # after a line that was cut short
            file.write(text if file.read(1) == b"\n" else b"\n" + text)

    def _read(self) -> None:
        """Read the file, if there is one.

        Raises:
            DraftwellError: it is no file of trials, or of a newer version (`not_a_study`).
        """
        try:
            lines = self.file.read_bytes().split(b"\n") if self.file is not None else []
        except FileNotFoundError:
            return
        if not any(lines):
            return
        if row_of(lines[0]) != HEAD:
            raise DraftwellError(
                f"{self.file} is no file of trials that this version reads (up to 0.6 they "
                "were SQLite databases): name "
                "another with --study, or move it away",
                code="not_a_study",
            )
        for row in map(row_of, lines[1:]):
            if row.get("description") and row.get("strategy") and row.get("search"):
                self._descriptions.setdefault(row["strategy"], {})[row["search"]] = row[
                    "description"
                ]
            elif row.get("trial") and row.get("search"):
                try:
                    trial = Trial.model_validate(row["trial"])
                except ValidationError:
                    continue  # not one of ours: it is tried again
                self._trials.setdefault(row["search"], {})[trial.choice] = trial


def row_of(line: bytes) -> dict[str, Any]:
    """A line's object; empty where it holds none, as one that was cut short.

    >>> row_of(b'{"a": 1}'), row_of(b'{"a": ')
    ({'a': 1}, {})
    """
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def digest_of(strategy: str, description: Description) -> str:
    """What binds trials to their description."""
    return f"{strategy}-{json_digest(description)[:16]}"


def difference(recorded: Description, wanted: Description) -> str:
    """The first key in which two descriptions differ."""
    return next((key for key in wanted if recorded.get(key) != wanted[key]), "settings")
