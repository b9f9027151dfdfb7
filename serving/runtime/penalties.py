"""Presence and frequency penalties of one request, with counts that are kept from forward pass to forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from serving.runtime.requests import Sampling


class Penalties:
    """What the tokens that a request has written take off its logits: presence·[count(t) > 0] + frequency·count(t) (OpenAI's formula).

    A token is counted once, when it is first written, and uncounted if it was drafted and rejected; a forward pass then costs one
    subtraction, however long the text is.

    >>> import torch
    >>> penalties = Penalties(Sampling(frequency_penalty=1.0)).follow([2, 0, 2])
    >>> penalties.apply(torch.zeros(2, 3)).tolist()  # the first row predicts the second 2
    [[-1.0, 0.0, -1.0], [-1.0, 0.0, -2.0]]
    """

    def __init__(self, sampling: Sampling):
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self.written: list[int] = []
        self._counts: Counter[int] = Counter()
        self._changed: set[int] = set()
        self._amounts: Tensor | None = None  # [vocab], up to date but for `_changed`

    def follow(self, written: Sequence[int]) -> Penalties:
        """Count these tokens instead of those before; only what differs from them is looked at."""
        same = min(len(written), len(self.written))
        while self.written[:same] != list(written[:same]):  # a draft is short: few steps back
            same -= 1
        for token in self.written[same:]:
            self._counts[token] -= 1
        self._counts.update(written[same:])
        self._changed.update(self.written[same:], written[same:])
        self.written[same:] = written[same:]
        return self

    def apply(self, logits: Tensor) -> Tensor:
        """Penalised logits `[rows, vocab]` of consecutive positions, the last of which predicts the token after all that is written.

        Row i of n counts all written tokens but the last n − 1 − i.
        """
        amounts = self._refreshed(logits)
        penalised = logits - amounts
        rows, tokens, fewer = self._earlier_rows(len(logits))
        if rows:
            penalised[rows, tokens] = logits[rows, tokens] - logits.new_tensor(fewer)
        return penalised

    def _refreshed(self, logits: Tensor) -> Tensor:
        """Amounts `[vocab]` for the last row."""
        if self._amounts is None or self._amounts.device != logits.device or self._amounts.shape != logits.shape[1:]:
            self._amounts = logits.new_zeros(logits.shape[1:])
            self._changed = set(self._counts)
        if self._changed:
            changed = list(self._changed)
            self._amounts[changed] = logits.new_tensor([self._amount(self._counts[token]) for token in changed])
            self._changed.clear()
        return self._amounts

    def _earlier_rows(self, rows: int) -> tuple[list[int], list[int], list[float]]:
        """Row, token and amount wherever a row counts fewer of a token than the last row does."""
        places: list[int] = []
        tokens: list[int] = []
        amounts: list[float] = []
        uncounted: Counter[int] = Counter()
        for back in range(1, rows):
            if back <= len(self.written):
                uncounted[self.written[-back]] += 1
            for token, fewer in uncounted.items():
                places.append(rows - 1 - back)
                tokens.append(token)
                amounts.append(self._amount(self._counts[token] - fewer))
        return places, tokens, amounts

    def _amount(self, count: int) -> float:
        return self._presence + self._frequency * count if count > 0 else 0.0
