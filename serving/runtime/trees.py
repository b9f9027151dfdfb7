"""Drafts with alternatives: a tree of tokens, each of which continues the path from the text to its
parent (SpecInfer, 2305.09781).

One forward pass of the target reads the whole tree; at most one path of it becomes text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwell.serving.runtime.types import Draft

ROOT = -1
"""Parent of the tokens that follow the text."""


@dataclass
class DraftTree:
    """Tokens proposed for verification as a tree, deterministically: the likeliest ones, or those
    of n-grams.

    Args:
        tokens: the proposed ids; siblings that are judged differ from each other.
        parents: of each token the place of its parent in `tokens`, which comes before it; `ROOT`:
            it follows the text.
        read_along: so many of the last tokens are in the verification batch, but are no draft
            tokens (a lookahead branch, read for the target's rows alone): they are nobody's
            children, so no rule looks at them and they never become text.

    >>> tree = DraftTree([5, 6, 7, 8], [ROOT, ROOT, 0, 2])
    >>> tree.children(ROOT), tree.depths, tree.path(3), tree.is_chain
    ([0, 1], [1, 1, 2, 3], [0, 2, 3], False)
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    read_along: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int) -> int:
        """Append a proposal; its place."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    @property
    def judged(self) -> int:
        """How many of the tokens are proposals: all but those that are read along."""
        return len(self.tokens) - self.read_along

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it, and all are judged."""
        return not self.read_along and all(parent == i - 1 for i, parent in enumerate(self.parents))

    def children(self, node: int) -> list[int]:
        """Places of the tokens that follow a token (or the text), in the order in which they are
        tested."""
        return [i for i, parent in enumerate(self.parents[: self.judged]) if parent == node]

    def path(self, node: int) -> list[int]:
        """Places of the tokens from the text to a token, itself included."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @property
    def depths(self) -> list[int]:
        """Of each token how many tokens its path has."""
        return depths(self.parents)

    def draft(self, path: Sequence[int]) -> Draft:
        """The draft that a path and, after it, first children down to a leaf make: what would have
        been proposed without alternatives."""
        places = list(path)
        while following := self.children(places[-1] if places else ROOT):
            places.append(following[0])
        return Draft([self.tokens[i] for i in places])


def depths(parents: Sequence[int]) -> list[int]:
    """Of each token of a tree how many tokens its path has, itself included.

    >>> depths([-1, -1, 0, 2])
    [1, 1, 2, 3]
    """
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return found


@dataclass
class TreeVerdict:
    """What an acceptance rule decided about a tree.

    Args:
        path: places of the tokens kept, from the text on.
        token: the token sampled from the target after them, or None when the text ended inside the
            tree.
        rejected: all children of the last kept token were tested, and none was kept.
        tested: tokens looked at.
    """

    path: list[int]
    token: int | None
    rejected: bool
    tested: int
