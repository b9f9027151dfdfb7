"""SuffixDecoding: a draft is what followed the longest match of the text's end, in the text itself
or in a datastore (2411.04975).

The paper keeps both in suffix trees. Here the request's own text has an index of where each pair of
tokens ends, whose latest entries are compared backwards: a token is indexed once, whatever is
asked, and only final tokens ever are. The datastore has its suffix array.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftwell.serving.artifacts.datastore import LONGEST, MOST, SHORTEST, Continuations, Datastore
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.continuations import likeliest_tree
from draftwell.serving.runtime.requests import Text
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.trees import DraftTree

BITS = 32
"""Of a token in the number that stands for a pair."""


class SuffixIndex:
    """Where in a text that grows its last tokens stood before.

    Args:
        longest: longest match.
        most: latest places of the last two tokens that are looked at; so a round's time has a
            bound.

    >>> index = SuffixIndex()
    >>> index.extend([1, 2, 3, 9, 1, 2])
    >>> index.continuations(limit=2)
    Continuations(length=2, tokens=[[3, 9]])
    """

    def __init__(self, longest: int = LONGEST, most: int = MOST):
        self.longest, self.most = longest, most
        self._ids: list[int] = []
        self._ends: dict[int, list[int]] = {}

    def extend(self, ids: Sequence[int]) -> None:
        """Index a text that begins with what is indexed already."""
        begin = len(self._ids)
        self._ids.extend(ids[begin:])
        for end in range(max(SHORTEST, begin + 1), len(self._ids) + 1):
            self._ends.setdefault(self._ids[end - 2] << BITS | self._ids[end - 1], []).append(end)

    def continuations(self, limit: int) -> Continuations:
        """What followed the text's last n tokens where they stood before, for the largest n from
        `longest` down to 2; the latest first.

        Args:
            limit: tokens of a continuation at most, at least 1.
        """
        ids, here = self._ids, len(self._ids)
        if here <= SHORTEST:
            return Continuations(0, [])
        ends = self._ends[ids[-2] << BITS | ids[-1]]  # the last of them is the text's own end
        best, found = 0, list[int]()
        for end in ends[-2 : -self.most - 2 : -1]:
            length, most = SHORTEST, min(self.longest, end)
            while length < most and ids[end - length - 1] == ids[here - length - 1]:
                length += 1
            if length > best:
                best, found = length, []
            if length == best:
                found.append(end)
        return Continuations(best, [ids[end : end + limit] for end in found])


class Suffix:
    """Proposes the better scored of the request's own continuations and the datastore's;
    deterministic.

    Args:
        factor: alpha: tokens of a draft at most for each token of the match.
        size: tokens of a draft at most.
        branches: alternatives at one place at most.
        least: smallest probability of a path.
    """

    def __init__(
        self,
        factor: float,
        size: int,
        branches: int,
        least: float,
        datastore: Datastore | None = None,
    ):
        self.factor, self.size, self.branches, self.least, self.datastore = (
            factor,
            size,
            branches,
            least,
            datastore,
        )
        self._index = SuffixIndex()
        self._text: Text | None = None

    def propose(self, session: Session, limit: int) -> Step[DraftTree]:
        if session.text is not self._text:
            self._text, self._index = session.text, SuffixIndex()
        self._index.extend(session.text.ids)
        best, best_score = DraftTree(), 0.0
        if limit > 0:
            found = [self._index.continuations(self.size)]
            if self.datastore is not None:
                found.append(self.datastore.continuations(session.text.ids, self.size))
            for one in found:
                tree, score = self._grow(session, one, limit)
                if score > best_score:
                    best, best_score = tree, score
        session.stats.drafted += len(best)
        return best
        yield  # a generator without a forward pass

    def _grow(self, session: Session, found: Continuations, limit: int) -> tuple[DraftTree, float]:
        size = min(self.size, int(self.factor * found.length), session.tree_room())
        branches = self.branches if session.target.trees else 1
        return likeliest_tree(
            found,
            size,
            levels=limit,
            branches=branches,
            least=self.least,
            stop=session.sampling.stop_token_ids,
        )
