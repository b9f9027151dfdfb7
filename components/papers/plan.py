"""What a cell is measured on and with: its prompts, the pair's weights and the artifacts that its
strategies read; and where its file is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from draftwell.components.papers.cells import Cell
from draftwell.components.papers.prompts import Chosen, choose
from draftwell.components.papers.verifiers import HOW_TRAINED
from draftwell.components.prompts.overlap import TrainingPrompts, hash_of
from draftwell.serving.files import json_digest


@dataclass(frozen=True)
class MadeOf:
    """What a cell is measured with that its settings do not name.

    Args:
        fingerprint: of the pair (`draftwell.serving.artifacts.pair_files.fingerprint`).
        artifacts: kind → digest of the artifacts that its strategies read, but for the hardware
            profile, which every run measures.
        prompts: that these artifacts and a distilled draft were made from: nothing is measured on
            them.
        target: fingerprint of the target alone.
    """

    fingerprint: str = ""
    artifacts: Mapping[str, str] = field(default_factory=dict)
    prompts: TrainingPrompts = field(default_factory=TrainingPrompts)
    target: str = ""

    @property
    def digests(self) -> dict[str, str]:
        """All of it, as cells' files have it.

        >>> MadeOf("f0", {"verifier": "d1"}).digests
        {'pair': 'f0', 'verifier': 'd1'}
        """
        return {"pair": self.fingerprint, **self.artifacts}


class Planned(NamedTuple):
    """A cell's file, prompts and artifacts, and role → prompts of what is made for it."""

    path: Path
    chosen: Chosen
    made: MadeOf
    training: Mapping[str, Chosen]

    @property
    def folder(self) -> Path:
        """Of the run, which keeps texts and traces, too."""
        return self.path.parent

    @property
    def source(self) -> str:
        """All prompts in words."""
        return "; ".join(
            [self.chosen.source, *(f"{role}: {one.source}" for role, one in self.training.items())]
        )


@dataclass(frozen=True)
class Run:
    """Where the cells of a run are, and what else makes their keys.

    Args:
        folder: of the cells' files.
        where: number format and device: what was measured elsewhere is measured again.
        data: folder of the papers' data sets, see `prompts.choose`.
        made_of: what a cell is measured with.
    """

    folder: Path
    where: str = ""
    data: Path | None = None
    made_of: Callable[[Cell], MadeOf] = lambda cell: MadeOf()
    known: dict[str, Planned] = field(default_factory=dict, compare=False, repr=False)

    def planned(self, cell: Cell) -> Planned:
        """Where a cell's file is, and what it is measured on; found out once."""
        settings = cell.model_dump_json()
        if settings not in self.known:
            self.known[settings] = self._plan(cell)
        return self.known[settings]

    def _plan(self, cell: Cell) -> Planned:
        made = self.made_of(cell)
        training = {
            role: choose(name, cell.training_prompts, self.data, made.prompts)
            for role, name in cell.training.items()
        }
        taken = {hash_of(prompt) for one in training.values() for prompt in one.prompts}
        chosen = choose(cell.data, cell.prompts, self.data, made.prompts, taken)
        digest = chosen.digest
        if training:
            digest = json_digest([HOW_TRAINED, digest, *(one.digest for one in training.values())])
        key = cell.key(digest, self.where, made.digests)
        return Planned(self.folder / f"{cell.name}-{key}.json", chosen, made, training)
