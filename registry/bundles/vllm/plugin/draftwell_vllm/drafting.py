"""Drafts behind rows of texts: of each text's own n-grams and, where one is named, of a draft
model, ended by a stop rule.

Nothing here knows vLLM's model runner: `proposers` gives its first one what it asks for. Rows may
move between two calls, so what was drafted for a row, and how much of it the target kept, is found
in the row's text the next time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .ngrams import guess
from .stopping import StopRule

log = logging.getLogger("vllm.draftwell")

SHORTEST_NGRAM, LONGEST_NGRAM = 1, 4
"""Tokens at the end of a text that are looked up in it; what gates judge has these values."""
WINDOW = 16384
"""Tokens at the end of a text that are searched, so that a draft's time has a bound."""
TAIL = 8
"""Last tokens of a text by which a row is known again."""


class Drafted(NamedTuple):
    """What was proposed for a row."""

    length: int
    tail: tuple[int, ...]
    tokens: list[int]
    confidences: list[float]
    rule: StopRule


class Drafter:
    """Drafts for all rows of a step.

    Args:
        k: longest draft.
        lengths: (from so many rows on, longest draft); empty: always `k`.
        context: tokens of a row, at most.
        rule: ends drafts of n-grams.
        draft_rule: ends those of the draft model, which `model` is.
    """

    def __init__(
        self,
        k: int,
        lengths: Sequence[tuple[int, int]],
        context: int,
        rule: StopRule,
        draft_rule: StopRule,
    ):
        self.k, self.context = k, context
        self.lengths = sorted((first, min(length, k)) for first, length in lengths)
        self.rule, self.draft_rule = rule, draft_rule
        self._model: Any = None  # vLLM takes an attribute `model` for layers of its own
        self._drafted: dict[int, Drafted] = {}
        self._complained = False

    def draft_rows(self, texts: Sequence[Any], wanted: Sequence[bool]) -> list[list[int]]:
        """A draft for every row.

        Args:
            texts: of each row its [tokens] ids.
            wanted: of each row whether it gets a draft.
        Returns:
            of each row at most `k` ids; empty where nothing is drafted, as where that failed: what
            is raised here would end vLLM.
        """
        before, self._drafted = self._drafted, {}
        longest = self.longest(len(texts))
        found: list[list[int]] = []
        for row, (ids, is_wanted) in enumerate(zip(texts, wanted, strict=True)):
            try:
                found.append(
                    self._draft_row(row, ids, longest if is_wanted else 0, before.get(row))
                )
            except Exception:
                found.append([])
                if not self._complained:
                    self._complained = True
                    log.exception("a row gets no draft; this is said once")
        if self._model is not None:
            self._model.keep(len(found))
        return found

    def longest(self, rows: int) -> int:
        """The longest draft where so many requests are decoded at once. As in vLLM
        (`dynamic/utils.py`), numbers that no range names have the length of the range before
        them."""
        fitting = [k for first, k in self.lengths if first <= rows]
        return fitting[-1] if fitting else self.lengths[0][1] if self.lengths else self.k

    def _draft_row(self, row: int, ids: Any, longest: int, before: Drafted | None) -> list[int]:
        if before is not None:
            learn(before, ids)
        room = min(longest, self.context - len(ids))
        if room <= 0:
            return []
        drafted = self.draft(row, ids, room)
        if drafted.tokens:
            self._drafted[row] = drafted
        return drafted.tokens

    def draft(self, row: int, ids: Any, room: int) -> Drafted:
        """A draft of at most `room` tokens behind a row's text: of its n-grams, else of the draft
        model."""
        tokens, confidences = self._from_ngrams(ids[-WINDOW:], room)
        rule = self.rule
        if not tokens and self._model is not None:
            rule = self.draft_rule
            tokens, confidences = self._model.draft(row, ids.tolist(), room, rule)
        return Drafted(len(ids), tail_of(ids), tokens, confidences, rule)

    def _from_ngrams(self, ids: Any, room: int) -> tuple[list[int], list[float]]:
        text = np.empty(len(ids) + room, dtype=np.int64)
        text[: len(ids)] = ids
        tokens: list[int] = []
        confidences: list[float] = []
        self.rule.start()
        for length in range(len(ids), len(ids) + room):
            found = guess(text[:length], LONGEST_NGRAM, SHORTEST_NGRAM)
            if found is None or not self.rule.continues(found.confidence, found.entropy):
                break
            text[length] = found.token
            tokens.append(found.token)
            confidences.append(found.confidence)
        return tokens, confidences


def tail_of(ids: Any) -> tuple[int, ...]:
    """The last tokens of a text."""
    return tuple(int(token) for token in ids[-TAIL:])


def learn(drafted: Drafted, ids: Any) -> None:
    """Tell the rule what the target kept of a draft, where the row's text is still the one that it
    was made for and has grown."""
    if len(ids) <= drafted.length or tail_of(ids[: drafted.length]) != drafted.tail:
        return
    after = ids[drafted.length : drafted.length + len(drafted.tokens)].tolist()
    for token, now, confidence in zip(drafted.tokens, after, drafted.confidences, strict=False):
        drafted.rule.learn(confidence, token == now)
        if token != now:
            return
