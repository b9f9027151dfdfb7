"""What a cell is measured with that its settings do not name: the pair's weights, and the artifacts
that its strategies read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from draftwell.components.papers.cells import Cell
from draftwell.components.prompts.overlap import TrainingPrompts


@dataclass(frozen=True)
class MadeOf:
    """What a cell is measured with.

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


MadeOfCell = Callable[[Cell], MadeOf]


def nothing(cell: Cell) -> MadeOf:
    """Where nothing is known of it."""
    return MadeOf()
