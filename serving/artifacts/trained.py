"""What artifacts that were trained for one pair of models refuse of other ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from draftwell.serving.artifacts.base import Artifact, ArtifactError
from draftwell.serving.artifacts.kinds import KINDS


def check_state(kind: str, shape: Sequence[int], size: int, whose: str = "draft") -> None:
    """Refuse a hidden state of another size than a head or verifier was trained on."""
    if tuple(shape) != (size,):
        raise ArtifactError(
            f"the {kind} reads states of {size} numbers, the {whose}'s have {math.prod(shape)}: "
            f"train it for this pair (`{KINDS[kind].made_by}`)",
            code="state_size_differs",
        )


class Borrower(Artifact):
    """An artifact that borrows embeddings of the target that it was trained on.

    Args:
        donor: sha256 of that target's weights.
    """

    donor: str

    def check_donor(self, donor: str) -> None:
        """Refuse another target."""
        if donor != self.donor:
            raise ArtifactError(
                f"the {self.kind} belongs to a target with weights {self.donor[:12]}, not "
                f"{donor[:12]}: make one for this target (`{KINDS[self.kind].made_by}`)",
                code="another_donor",
            )
