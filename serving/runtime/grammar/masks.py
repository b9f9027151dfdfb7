"""A request's grammar, a matcher that follows one output, as masks over logits, the same for target
and drafts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwell.serving.errors import InvalidRequest


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


REMEMBERED = 128
"""Positions whose masks are kept: drafts are shorter, and the target asks for the masks that a
draft has asked for before."""

FREE_SECONDS, TOKEN_SECONDS = 0.2, 0.005
"""Processor time that a request's masks may take: at first, and for each token more. All other
requests wait meanwhile. Masks of a JSON schema take 0.04 ms a token, of the most complex of 225
schemas 0.3 (docs/log.md)."""

Mask = NDArray[np.bool_]


class GrammarMasks:
    """Which tokens a grammar allows at each position of one request's output, drafted tokens
    included.

    All models of a request share one object. It follows whatever sequence it is asked about: what
    was drafted and rejected is rolled back, and a position's mask is computed once however many
    models ask for it. After a token that the grammar forbids (an n-gram's, say, which the target is
    bound to reject), and after one that ends the text, everything is allowed: nobody looks at those
    rows.

    Args:
        stops: tokens that end the text.
    Raises:
        InvalidRequest: any method, where the grammar has taken too long by then
            (`invalid_grammar`).
    """

    def __init__(self, grammar: Grammar, stops: frozenset[int] = frozenset()):
        self._matcher, self._stops = grammar.matcher(), stops
        self._tokens: list[int] = []  # what the masks are about
        self._read = 0  # so many of them were given to the matcher
        self._known: dict[int, Mask] = {}  # by position
        self._seconds = 0.0

    def rule_out(self, logits: Tensor, written: Sequence[int], *, spare: bool = False) -> Tensor:
        """Logits `[rows, vocab]` of consecutive positions, with −∞ for tokens that may not come;
        the last predicts the token after all that is written. Rows before the output are left as
        they are.

        Args:
            spare: leave a row as it is where its model knows none of the allowed tokens (a draft
                whose head covers a part of the vocabulary).
        """
        found = self.masks(written, len(logits))
        if all(mask is None for mask in found):
            return logits
        keep = np.stack(
            [np.ones(logits.shape[-1], dtype=np.bool_) if mask is None else mask for mask in found]
        )
        ruled = logits.masked_fill(~torch.from_numpy(keep).to(logits.device), -math.inf)
        if spare:
            ruled = torch.where(ruled.amax(-1, keepdim=True) == -math.inf, logits, ruled)
        return ruled

    def must_end(self, written: Sequence[int], rows: int) -> list[bool]:
        """For the same rows as in `rule_out`: whether nothing but a token that ends the text may
        come."""
        return [mask is not None and self._only_ends(mask) for mask in self.masks(written, rows)]

    def masks(self, written: Sequence[int], rows: int) -> list[Mask | None]:
        """`[vocab]` masks of the same rows; None where everything is allowed."""
        with self._timed(len(written)):
            self._follow(written)
            return [
                self._at(position) for position in range(len(written) - rows + 1, len(written) + 1)
            ]

    def forced(self, written: Sequence[int]) -> list[int]:
        """Tokens after an output that the grammar leaves no choice about, its end included."""
        with self._timed(len(written)):
            self._follow(written)
            if not self._move(len(written)):
                return []
            forced = list(self._matcher.forced())
            taken = next(
                (i for i, token in enumerate(forced) if not self._matcher.accept(token)),
                len(forced),
            )
            forced = forced[:taken]
            self._tokens += forced
            self._read += taken
            after = self._at(self._read)  # kept: whoever reads on asks for this mask
        return (
            [*forced, int(after.argmax())]
            if after is not None and after.sum() == 1 and self._only_ends(after)
            else forced
        )

    @contextmanager
    def _timed(self, tokens: int) -> Iterator[None]:
        """Count the processor time of what is done within, and refuse a grammar that needs too much
        for so many tokens."""
        began = time.thread_time()
        yield
        self._seconds += time.thread_time() - began
        if self._seconds > FREE_SECONDS + TOKEN_SECONDS * tokens:
            raise InvalidRequest(
                (
                    "the grammar is too complex: its masks take too long; write it with fewer "
                    "ways to read one text"
                ),
                code="invalid_grammar",
            )

    def _only_ends(self, mask: Mask) -> bool:
        return int(mask.sum()) <= len(self._stops) and self._stops.issuperset(
            mask.nonzero()[0].tolist()
        )

    def _follow(self, written: Sequence[int]) -> None:
        """Be about these tokens instead of those before; only what differs from them is looked
        at."""
        same = min(len(written), len(self._tokens))
        while self._tokens[:same] != list(written[:same]):  # a draft is short: few steps back
            same -= 1
        if self._read > same:
            self._matcher.rollback(self._read - same)
            self._read = same
        if same < len(self._tokens):
            self._known = {
                position: mask for position, mask in self._known.items() if position <= same
            }
        self._tokens[same:] = written[same:]

    def _at(self, position: int) -> Mask | None:
        if position < 0:
            return None
        if position not in self._known:
            if not self._move(position):
                return None
            if len(self._known) == REMEMBERED:
                del self._known[min(self._known)]
            self._known[position] = self._matcher.allowed()
        return self._known[position]

    def _move(self, position: int) -> bool:
        """Bring the matcher to a position; False where a token before it ends the text or breaks
        the grammar."""
        if self._read > position:
            self._matcher.rollback(self._read - position)
            self._read = position
        while self._read < position:
            token, known = self._tokens[self._read], self._known.get(self._read)
            if token in self._stops or (known is not None and not known[token]):
                return False
            if not self._matcher.accept(token):
                if known is not None:  # all that follows would be free
                    raise InvalidRequest(
                        f"the grammar allows token {token} and does not know how to go on",
                        code="invalid_grammar",
                    )
                return False
            self._read += 1
        return True
