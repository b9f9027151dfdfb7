"""The client's prediction of the answer as a draft (OpenAI's predicted outputs): copied token by
token for as long as it holds.

As in a diff, after an edit the copy continues where the last tokens of the text stand in the
prediction, nearest to where it stopped. The target verifies all of it, so a wrong prediction costs
time and changes nothing. How many tokens of its drafts are kept is counted, by how much of the text
before them is the prediction's, and the round is left to the strategy where that is less than its
own drafts bring.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from draftwell.serving.runtime.requests import Text
from draftwell.serving.runtime.types import Draft, Verdict

SHORTEST, FIRST, LONGEST = 2, 8, 32
"""Tokens of a draft: as many as were kept last, twice over, from `FIRST` (where two in a row have
failed, `SHORTEST`) to `LONGEST`."""
WINDOW = 16
"""How far after the place where the prediction failed a single equal token is taken for its
continuation."""
MATCH = 8
"""Longest match of the text's end that is looked for."""
PLACES = 32
"""Places of a token that are looked at, on either side of where the prediction failed."""
FADE = 0.8
"""Weight of what earlier drafts brought, after each one: lengths and limits change."""
PATIENCE = 12
"""Rounds that are left to the strategy before a draft is tried again."""
GUESS = 0.5
"""Tokens that a draft is expected to bring at first where nothing before it is the prediction's;
elsewhere as many as fitted before it."""


class Prediction:
    """Proposes what follows in one request's prediction.

    >>> from draftwell.serving.runtime.requests import Sampling
    >>> text = Text([9], Sampling())
    >>> prediction = Prediction([1, 2, 3, 4, 5, 6])
    >>> prediction.propose(text, 3).tokens
    [1, 2, 3]
    >>> _ = text.append([1, 7, 8, 4])  # an edit: 2 and 3 became 7 and 8
    >>> prediction.propose(text, 9).tokens
    [5, 6]
    """

    def __init__(self, ids: Sequence[int]):
        self.ids = list(ids)
        self.at: int | None = 0
        """What comes next in the prediction; None: unknown."""
        self._near = 0  # after the last token that was copied
        self._read = 0  # tokens of the output that were followed
        self._length = FIRST
        self._misses = 0  # drafts in a row of which nothing was kept
        self._guessed = False  # since something was copied
        self._fit = MATCH  # of the text's last tokens, those that stand before `at`
        # by `_fit`, and one that brought what is expected at first
        self._drafts = [1.0] * (MATCH + 1)
        self._kept = [max(GUESS, float(fit)) for fit in range(MATCH + 1)]
        self._refused = 0  # rounds since the last draft
        self._drafted_at = 0  # `_fit` of the last draft
        self._places: dict[int, list[int]] = {}
        for place, token in enumerate(self.ids):
            self._places.setdefault(token, []).append(place)

    def propose(self, text: Text, limit: int, worth: float = 0.0) -> Draft:
        """At most `limit` >= 0 tokens after the text; none where the prediction says nothing of
        what comes next.

        Args:
            worth: tokens that a draft of the strategy's own brings; where fewer are expected,
                nothing is proposed.
        """
        self._follow(text.output)
        if self.at is None:
            return Draft()
        if self._kept[self._fit] / self._drafts[self._fit] < worth and self._refused < PATIENCE:
            self._refused += 1
            return Draft()
        self._drafted_at, self._refused = self._fit, 0
        tokens = self.ids[
            self.at : self.at + min(limit, FIRST if self._guessed else LONGEST, self._length)
        ]
        stops = text.sampling.stop_token_ids
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        return Draft(tokens[:end])

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Note what became of a draft, before the next one is asked for."""
        self._drafts[self._drafted_at] = FADE * self._drafts[self._drafted_at] + 1
        self._kept[self._drafted_at] = FADE * self._kept[self._drafted_at] + verdict.accepted
        self._misses = 0 if verdict.accepted else self._misses + 1
        self._length = min(
            LONGEST, max(FIRST if self._misses < 2 else SHORTEST, 2 * verdict.accepted)
        )

    def _follow(self, output: Sequence[int]) -> None:
        """Find the place after the tokens that the output has gained."""
        for token in output[self._read :]:
            if self.at is not None and self.at < len(self.ids) and self.ids[self.at] == token:
                self.at += 1
                self._near, self._guessed, self._fit = self.at, False, min(MATCH, self._fit + 1)
            else:
                self.at = None
        self._read = len(output)
        if self.at is None:
            self.at = self._find(output)
        if self.at is None and not self._guessed and self._near + 1 < len(self.ids):
            # one token took another's place
            self.at, self._guessed, self._fit = self._near + 1, True, 0

    def _find(self, output: Sequence[int]) -> int | None:
        """Where the output's last tokens stand in the prediction: the longest match, and of equal
        ones the nearest."""
        if not output:
            return None
        places = self._places.get(output[-1], [])
        middle = bisect_left(places, self._near)
        best: tuple[int, int] | None = None
        found = None
        for place in places[max(0, middle - PLACES) : middle + PLACES]:
            length, close = self._match(output, place), 0 <= place - self._near < WINDOW
            if length >= (1 if close else 2) + self._misses // 3:
                rank = length, -abs(place - self._near)
                if best is None or rank > best:
                    best, found, self._fit = rank, place + 1, length
        return found

    def _match(self, output: Sequence[int], place: int) -> int:
        """How many of the output's last tokens, up to `MATCH`, end at a place."""
        most = min(MATCH, len(output), place + 1)
        return next((n for n in range(1, most) if self.ids[place - n] != output[-1 - n]), most)
