"""Lookahead decoding's two branches (Fu 2024, 2402.02057, sections 3.1 to 3.3, and its code):
guesses of many tokens at once are refined by Jacobi iteration, and the n-grams that they pass
through are proposed where their first token comes up again.

The window has N − 1 levels: level 0 are the tokens right after the text, one after another; column
i of a further level is what the target said, one forward pass earlier, after column i of the level
before. So a column is a trajectory that leaves the chain of level 0 at its place, and a tree's
parents say all that the paper's mask says. After a pass the first level is dropped, and the
target's predictions after the last level become the newest one; a column and the prediction after
it are an n-gram for the pool.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.trees import ROOT, DraftTree


class NGramPool:
    """N-grams by their first token, the latest last; of each first token at most `most` are kept.

    >>> pool = NGramPool(size=3, most=2)
    >>> pool.extend([7, 8, 9, 7, 8, 5, 7, 8, 9])
    >>> pool.after(7)
    [(8, 9), (8, 5)]
    """

    def __init__(self, size: int, most: int):
        self.size, self.most = size, most
        self._ngrams: dict[int, list[tuple[int, ...]]] = {}
        self._read = 0

    def add(self, first: int, rest: Iterable[int]) -> None:
        """Put an n-gram in front of those with its first token."""
        known, ngram = self._ngrams.setdefault(first, []), tuple(rest)
        if ngram in known:
            known.remove(ngram)
        known.append(ngram)
        del known[: -self.most]

    def extend(self, text: Sequence[int]) -> None:
        """Add the n-grams of a text that begins with what was added before."""
        for start in range(self._read, len(text) - self.size + 1):
            self.add(text[start], text[start + 1 : start + self.size])
            self._read = start + 1

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed a token, the latest first, without the token itself."""
        return self._ngrams.get(token, [])[::-1]


class Lookahead:
    """A tree of n-grams from the pool, and the window read along with it; one object serves one
    request.

    Args:
        window: W, columns of the window.
        size: N, tokens of an n-gram.
        guesses: G, n-grams proposed at once, and kept for each first token.
        from_text: whether the pool also holds the n-grams of prompt and output.
    """

    def __init__(self, window: int, size: int, guesses: int, *, from_text: bool = True):
        self.window, self.size, self.from_text = window, size, from_text
        self.pool = NGramPool(size, guesses)
        self._levels: list[list[int]] = []
        # of the window in the tree that is being read; empty where it is not
        self._places: list[list[int]] = []
        # passes after which every level is a prediction: until then guesses from the prompt are in
        # between
        self._fresh = size - 2
        self._before = ROOT  # the text's last token when the tree was made

    def propose(self, session: Session, limit: int) -> Step[DraftTree]:
        """As `TreeDrafter.propose`; the window is read along where all of it fits and something may
        still be drafted."""
        ids, room = session.text.ids, session.tree_room()
        if self.from_text:
            self.pool.extend(ids)
        tree, self._places, self._before = DraftTree(), [], ids[-1]
        for ngram in self.pool.after(ids[-1]) if limit else []:
            self._graft(tree, ngram[:limit], room, session)
            if not session.target.trees:
                break
        session.stats.drafted += len(tree)
        if limit and session.target.trees and len(tree) + self.window * (self.size - 1) - 1 <= room:
            self._read_along(tree, ids)
        return tree
        yield  # a generator without a forward pass

    def follow(self, tree: DraftTree, path: Sequence[int], rows: Span) -> None:
        """After a verification: shift the window by what the target says after its last level, and
        pool its n-grams.

        A draft that came with the request is verified without `propose`, and has no window: the
        places are of one verification only.
        """
        places, self._places = self._places, []
        if not places:
            return
        top = rows.top
        newest = [top[place + 1] for place in places[-1]]
        firsts = [self._before, *self._levels[0]]
        if self._fresh > 0:
            self._fresh -= 1
        else:
            for i, first in enumerate(firsts):
                self.pool.add(first, [*(level[i] for level in self._levels[1:]), newest[i]])
        shifted = [*self._levels[1:], newest]
        self._levels = [shifted[0][1:], *shifted[1:]]

    def _graft(self, tree: DraftTree, ngram: Sequence[int], room: int, session: Session) -> None:
        """Add an n-gram to the tree, sharing what begins alike, up to a stop token and as far as
        there is room."""
        node = ROOT
        for token in ngram:
            known = next(
                (child for child in tree.children(node) if tree.tokens[child] == token), None
            )
            if known is None and len(tree) == room:
                return
            node = tree.add(token, node) if known is None else known
            if token in session.sampling.stop_token_ids:
                return

    def _read_along(self, tree: DraftTree, ids: Sequence[int]) -> None:
        """Add the window to the tree."""
        if not self._levels:
            # any tokens will do, as long as a request always gets the same; the code's are the
            # prompt's, too
            guess = random.Random(0)
            self._levels = [
                guess.choices(ids, k=self.window - (level == 0)) for level in range(self.size - 1)
            ]
        before, node = len(tree), ROOT
        chain = [node := tree.add(token, node) for token in self._levels[0]]
        self._places = [[ROOT, *chain]]
        for level in self._levels[1:]:
            self._places.append(
                [
                    tree.add(token, parent)
                    for token, parent in zip(level, self._places[-1], strict=True)
                ]
            )
        tree.read_along = len(tree) - before
