"""Prompt lookup: the draft is what followed the same n-gram earlier in the context (Saxena
2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.requests import Text
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft

BITS = 32
"""Of a token in the number that stands for an n-gram: thousands of tuples would be work for the
garbage collector."""


class NGramIndex:
    """Where each n-gram of a text that grows begins first; a token is looked at once, however often
    the index is asked.

    Args:
        max_ngram: longest n-gram that is indexed; all down to 1 are.

    >>> index = NGramIndex(max_ngram=3)
    >>> index.extend([1, 2, 3, 9, 1, 2])
    >>> index.follow([1, 2, 3, 9, 1, 2], num_tokens=2)
    [3, 9]
    """

    def __init__(self, max_ngram: int):
        self.length = 0
        self._firsts: list[dict[int, int]] = [{} for _ in range(max_ngram)]

    def extend(self, ids: Sequence[int]) -> None:
        """Index a text that begins with what is indexed already."""
        if len(ids) == self.length:
            return
        for n, firsts in enumerate(self._firsts, start=1):
            begin = max(0, self.length - n + 1)
            fresh = ids[begin:]
            keys = list(fresh)
            for after in range(1, n):
                keys = [
                    key << BITS | token for key, token in zip(keys, fresh[after:], strict=False)
                ]
            for start, key in enumerate(keys, start=begin):
                firsts.setdefault(key, start)
        self.length = len(ids)

    def follow(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens after the earliest earlier occurrence of the last n-gram, n
        from `max_ngram` down to 1.

        Args:
            ids: what is indexed and, after it, a few tokens that may still be rejected.
        """
        for n in range(min(len(self._firsts), len(ids) - 1), 0, -1):
            last = len(ids) - n
            ngram = ids[last:]
            start = self._firsts[n - 1].get(
                reduce(lambda key, token: key << BITS | token, ngram), last
            )
            # nowhere in the index, or only as the last n-gram itself: it may still overlap what is
            # not indexed
            if start == last:
                unindexed = range(max(0, self.length - n + 1), last)
                start = next((at for at in unindexed if ids[at : at + n] == ngram), last)
            if start < last:
                return list(ids[start + n : start + n + num_tokens])
        return []


class NGram:
    """Proposes deterministically; fewer tokens than asked for are fine (ours), no match proposes
    nothing.

    Args:
        max_ngram: longest n-gram tried.
        num_tokens: longest draft.
        elsewhere: asked where the context has no match, with the context and how many tokens are
            wanted at most.
    """

    def __init__(
        self,
        max_ngram: int,
        num_tokens: int,
        elsewhere: Callable[[Sequence[int], int], list[int]] | None = None,
    ):
        self.max_ngram, self.num_tokens, self.elsewhere = max_ngram, num_tokens, elsewhere
        self._index = NGramIndex(max_ngram)
        self._text: Text | None = None

    def propose(self, session: Session, limit: int, pending: Draft | None = None) -> Step[Draft]:
        if session.text is not self._text:
            self._text, self._index = session.text, NGramIndex(self.max_ngram)
        self._index.extend(session.text.ids)
        ids = session.text.ids + pending.tokens if pending else session.text.ids
        wanted = min(limit, self.num_tokens)
        tokens = self._index.follow(ids, wanted)
        draft = Draft(tokens if tokens or self.elsewhere is None else self.elsewhere(ids, wanted))
        stops = [i for i, t in enumerate(draft.tokens) if t in session.sampling.stop_token_ids]
        draft = draft[: stops[0] + 1] if stops else draft
        session.stats.drafted += len(draft)
        return draft
        yield  # a generator without a forward pass
