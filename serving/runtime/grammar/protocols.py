"""What a grammar is to the runtime: a matcher that follows one output and says which tokens may
come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Matcher(Protocol):
    """Follows one output, token by token; tokens that end the text are never given to it."""

    def allowed(self) -> NDArray[np.bool_]:
        """`[vocab]`: the tokens that may come next; those that end the text among them where the
        output may end. At least one is there.

        Raises:
            InvalidRequest: the grammar is too complex to say.
        """

    def accept(self, token: int) -> bool:
        """Follow one more token; False if it may not come, and nothing changes."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens that were accepted."""

    def forced(self) -> Sequence[int]:
        """Tokens that spell what the grammar leaves no choice about, the usual spelling where there
        are several: drafts, not decisions."""


class Grammar(Protocol):
    """What outputs have to be; compiled once, for any number of requests."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an output."""
