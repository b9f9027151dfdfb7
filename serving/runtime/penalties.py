"""What the tokens before a position change in its logits: penalties, stop tokens that may not come
yet, and what a grammar rules out. Counts are kept from forward pass to forward pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwell.serving.runtime.grammar.masks import GrammarMasks
from draftwell.serving.runtime.requests import Sampling


class Penalties:
    """What the tokens of a request change in its logits, of drafts and of the target alike, in this
    order (vLLM's):

    1. repetition penalty: z(t) of a token of prompt or output is divided by it if positive, else
       multiplied;
    2. z(t) − presence·[count(t) > 0] − frequency·count(t), by counts of the output (OpenAI's
       formula);
    3. stop tokens are at −∞ while the output has fewer than `min_tokens` tokens, where a grammar
       allows anything else.

    `rule_out` comes before all of these: what a grammar forbids is at −∞ in the raw distribution
    too, as bans are.

    A token is counted once, when it is first written, and uncounted if it was drafted and rejected.
    A forward pass then goes through what was written since the last one, and costs a few tensor
    operations over the vocabulary; of the whole text only that it still begins as before is looked
    at.

    Args:
        prompt: its tokens, for the repetition penalty.
        grammar: of the request, shared by its models; None where the output is free.
        spare: as in `GrammarMasks.rule_out`.

    >>> import torch
    >>> penalties = Penalties(Sampling(frequency_penalty=1.0)).follow([2, 0, 2])
    >>> penalties.apply(torch.zeros(2, 3)).tolist()  # the first row predicts the second 2
    [[-1.0, 0.0, -1.0], [-1.0, 0.0, -2.0]]
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        grammar: GrammarMasks | None = None,
        *,
        spare: bool = False,
    ):
        self._grammar, self._spare = grammar, spare
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._repetition, self.prompt = sampling.repetition_penalty, prompt
        self._prompt_tokens = frozenset(prompt) if self._repetition != 1.0 else frozenset()
        self._min_tokens, self._stops = sampling.min_tokens, sorted(sampling.stop_token_ids)
        self._counting = self._presence != 0.0 or self._frequency != 0.0 or self._repetition != 1.0
        self.written: list[int] = []
        self._counts: Counter[int] = Counter()
        self._changed: set[int] = set()
        self._amounts: Tensor | None = None  # [vocab], up to date but for `_changed`
        # [vocab], true of tokens that prompt or output hold; as up to date, under a repetition
        # penalty
        self._held: Tensor | None = None

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

    def rule_out(self, logits: Tensor) -> Tensor:
        """Logits `[rows, vocab]` as in `apply`, with −∞ for what the grammar forbids."""
        return (
            logits
            if self._grammar is None
            else self._grammar.rule_out(logits, self.written, spare=self._spare)
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Logits `[rows, vocab]` of consecutive positions as a request changes them; the last
        position predicts the token after all that is written.

        Row i of n counts all written tokens but the last n − 1 − i.
        """
        if not self._counting:
            return self._without_early_stops(logits)
        amounts = self._refreshed(logits)
        places, tokens, fewer = self._earlier_rows(len(logits))
        if self._repetition != 1.0:
            logits = self._less_repetitive(logits, places, tokens, fewer)
        penalised = logits - amounts
        if places:
            amount = logits.new_tensor([self._amount(count) for count in fewer])
            penalised[places, tokens] = logits[places, tokens] - amount
        return self._without_early_stops(penalised)

    def _without_early_stops(self, logits: Tensor) -> Tensor:
        """Logits with stop tokens at −∞ in rows that predict an output token before
        `min_tokens`."""
        # output position of the first row; below 0 within the prompt
        first = len(self.written) - len(logits) + 1
        rows = list(range(max(0, -first), min(len(logits), self._min_tokens - first)))
        if not rows or not self._stops:
            return logits
        if self._grammar is not None:
            must_end = self._grammar.must_end(self.written, len(logits))
            rows = [row for row in rows if not must_end[row]]
        held = logits.clone()
        held[torch.tensor(rows, dtype=torch.long)[:, None], self._stops] = -math.inf
        return held

    def _less_repetitive(
        self, logits: Tensor, places: list[int], tokens: list[int], counts: list[int]
    ) -> Tensor:
        """Logits under the repetition penalty; the other arguments are what `_earlier_rows`
        gives."""
        assert self._held is not None
        columns = self._held.nonzero().squeeze(1)
        before, held = logits, logits[:, columns]
        logits = logits.clone()
        logits[:, columns] = torch.where(held > 0, held / self._repetition, held * self._repetition)
        new = [
            (row, token)
            for row, token, count in zip(places, tokens, counts, strict=True)
            if not self._holds(token, count)
        ]
        if new:  # after these rows
            rows, later = (list(side) for side in zip(*new, strict=True))
            logits[rows, later] = before[rows, later]
        return logits

    def _holds(self, token: int, count: int) -> bool:
        """Whether a token that the output holds so often is one of prompt and output."""
        return count > 0 or token in self._prompt_tokens

    def _refreshed(self, logits: Tensor) -> Tensor:
        """Amounts `[vocab]` for the last row."""
        if (
            self._amounts is None
            or self._amounts.device != logits.device
            or self._amounts.shape != logits.shape[1:]
        ):
            self._amounts = logits.new_zeros(logits.shape[1:])
            self._changed = set(self._counts)
            if self._repetition != 1.0:
                self._held = torch.zeros_like(self._amounts, dtype=torch.bool)
                self._held[[*self._prompt_tokens]] = True
        if self._changed:
            changed = list(self._changed)
            self._amounts[changed] = logits.new_tensor(
                [self._amount(self._counts[token]) for token in changed]
            )
            if self._held is not None:
                self._held[changed] = torch.tensor(
                    [self._holds(token, self._counts[token]) for token in changed],
                    device=logits.device,
                )
            self._changed.clear()
        return self._amounts

    def _earlier_rows(self, rows: int) -> tuple[list[int], list[int], list[int]]:
        """Row, token and count wherever a row counts fewer of a token than the last row does."""
        places: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        uncounted: Counter[int] = Counter()
        for back in range(1, rows):
            if back <= len(self.written):
                uncounted[self.written[-back]] += 1
            for token, fewer in uncounted.items():
                places.append(rows - 1 - back)
                tokens.append(token)
                counts.append(self._counts[token] - fewer)
        return places, tokens, counts

    def _amount(self, count: int) -> float:
        return self._presence + self._frequency * count if count > 0 else 0.0
