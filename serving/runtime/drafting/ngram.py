"""Prompt lookup: the draft is what followed the same n-gram earlier in the context (Saxena 2023)."""

from __future__ import annotations

from serving.runtime.commands import Step
from serving.runtime.session.session import Session
from serving.runtime.types import Draft


def lookup(ids: list[int], max_ngram: int, num_tokens: int) -> list[int]:
    """Tokens after the earliest earlier occurrence of the context's last n-gram, n from `max_ngram` down to 1.

    >>> lookup([1, 2, 3, 9, 1, 2], max_ngram=3, num_tokens=2)
    [3, 9]
    """
    for n in range(min(max_ngram, len(ids) - 1), 0, -1):
        suffix = ids[-n:]
        for start in range(len(ids) - n):
            if ids[start] == suffix[0] and ids[start : start + n] == suffix:
                return ids[start + n : start + n + num_tokens]
    return []


class NGram:
    """Proposes deterministically; fewer tokens than asked for are fine (ours), no match proposes nothing.

    Args:
        max_ngram: longest n-gram tried.
        num_tokens: longest draft.
    """

    def __init__(self, max_ngram: int, num_tokens: int):
        self.max_ngram, self.num_tokens = max_ngram, num_tokens

    def propose(self, session: Session, limit: int, pending: Draft | None = None) -> Step[Draft]:
        ids = session.text.ids + (pending.tokens if pending else [])
        draft = Draft(lookup(ids, self.max_ngram, min(limit, self.num_tokens)))
        stops = [i for i, t in enumerate(draft.tokens) if t in session.sampling.stop_token_ids]
        draft = draft[: stops[0] + 1] if stops else draft
        session.stats.drafted += len(draft)
        return draft
        yield  # a generator without a forward pass
