"""The file of trials: what tunings have tried.

A trial belongs to a *description*: everything that its values depend on, as plain JSON. So trials
of another trace, table or profile are never mixed with these, and a larger search space reuses
those it shares. A file that the user named must hold no other description of the same strategy; the
default file may, because there they are older tunings only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftwell.components.results import Results
from draftwell.components.tune.evidence import Trial
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest
from draftwell.serving.runtime.strategies import StrategyChoice

Description = Mapping[str, Any]


class TrialLog:
    """The trials of this tuning and of earlier ones.

    Args:
        file: created with the first trial if it does not exist; None keeps trials in memory.
        named: whether the user chose the file (see the module's first lines).
    Raises:
        DraftwellError: the file holds something else (`not_a_study`).
    """

    def __init__(self, file: Path | None, *, named: bool = False):
        self.file, self.named = file, named
        refusal = DraftwellError(
            f"{file} is no file of trials that this version reads: name another with --study, or "
            "move it away",
            code="not_a_study",
        )
        self._rows: Results[dict[str, Any]] = Results(
            file, "trials", dict[str, Any], refusal=refusal
        )

    def check(self, descriptions: Mapping[str, Description]) -> None:
        """Refuse a file that the user named and that holds another search of the same strategy;
        nothing is written.

        Args:
            descriptions: strategy → what its trials depend on.
        Raises:
            DraftwellError: it does (`study_of_another_search`).
        """
        for row in self.values("description") if self.named else ():
            wanted, recorded = descriptions.get(row["strategy"]), row["description"]
            if wanted is not None and json_digest(wanted) != json_digest(recorded):
                raise DraftwellError(
                    f"the study {self.file} is of another search, the "
                    f"{difference(recorded, wanted)} of {row['strategy']} "
                    "differ: name another file with --study, or leave --study out",
                    code="study_of_another_search",
                )

    def known(self, strategy: str, description: Description) -> dict[StrategyChoice, Trial]:
        """The trials of a strategy under a description, in the order in which they were added."""
        search = digest_of(strategy, description)
        found = {}
        for row in self.values("trial"):
            if row.get("search") == search:
                try:
                    trial = Trial.model_validate(row["trial"])
                except ValidationError:
                    continue  # damaged: it is tried again
                found[trial.choice] = trial
        return found

    def add(self, description: Description, trial: Trial) -> None:
        """Keep a trial, on disk before this returns."""
        search = digest_of(trial.strategy, description)
        if search not in self._rows:
            self._rows.put(search, {"strategy": trial.strategy, "description": description})
        values = trial.model_dump(mode="json", exclude_unset=True)
        key = f"{search} {json_digest(trial.choice.to_json())}"
        self._rows.put(key, {"search": search, "trial": values})

    def values(self, field: str) -> list[dict[str, Any]]:
        """The rows that have a field."""
        return [row for _, row in self._rows.items() if field in row]


def digest_of(strategy: str, description: Description) -> str:
    """What binds trials to their description."""
    return f"{strategy}-{json_digest(description)[:16]}"


def difference(recorded: Description, wanted: Description) -> str:
    """The first key in which two descriptions differ."""
    return next((key for key in wanted if recorded.get(key) != wanted[key]), "settings")
