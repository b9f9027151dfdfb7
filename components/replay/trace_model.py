"""Models that answer from a trace: the strategies' own generators run over them, without any
weights.

At temperature 0 a lossless strategy's text is the target's own, whatever the draft does. So the
target's next token is known along the text. If the draft is fed tokens that leave the text at
position d, it has continued its own choice at d, and its next token is in the rollout recorded
there. Nothing else is ever read, which makes a replay exact. A sampled text is replayed in the same
way, after a random draw for each of its tokens of whether the draft had drawn it too
(`draftwell.components.replay.sampled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from draftwell.components.replay.traced_text import NotInTrace, RolloutExhausted, TracedText
from draftwell.serving.runtime.commands import Forward, Role, Step
from draftwell.serving.runtime.logits import GREEDY, Drawn, Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.random_streams import RandomStream
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.slot_texts import SlotText

OFF_TEXT = -1
"""The token of a row that no strategy reads: the target's after a draft token that is not in the
text."""


@dataclass
class TraceSpan:
    """Rows of a trace: the token of each and, for the draft's rows, what was recorded of its
    distribution. What else rows have (`serving.runtime.logits.Span`) was not recorded.

    Args:
        top: the token that is drawn at each row.
        places: of the draft's rows, position in the continuation and element of its rollout; −1 is
            the last recorded one.
        asked: whether a value of these rows has been read.
    """

    top: list[int]
    places: list[tuple[int, int]]
    model: TraceModel
    sampling: Sampling = GREEDY
    asked: bool = False

    def under(self, sampling: Sampling, changes: Penalties | None = None) -> Span:
        """The same rows, of a greedy request that alters no logits."""
        if sampling.penalises or sampling.biases:
            raise NotInTrace(
                "a replay has no logits to penalise or bias: measure this request instead"
            )
        if not sampling.greedy:
            raise NotInTrace(
                f"a replay is exact at temperature 0 only, not at {sampling.temperature}: "
                "measure this request instead"
            )
        return cast("Span", TraceSpan(self.top, self.places, self.model, sampling))

    def __len__(self) -> int:
        return len(self.top)

    def __getitem__(self, part: int | slice) -> Span:
        rows = part if isinstance(part, slice) else slice(part, part + 1 or None)
        return cast("Span", TraceSpan(self.top[rows], self.places[rows], self.model, self.sampling))

    def fetch_chances(self, rows: Sequence[int], tokens: Sequence[int]) -> Step[None]:
        yield from ()

    def confidence(self, row: int) -> float:
        return self._figure(self.model.text.confidence, row)

    def raw_prob(self, row: int, token: int) -> float:
        if token != self.top[row]:
            raise self._missing("probability of a token that is not the draft's most likely one")
        text = self.model.text
        return self._figure(text.confidence if text.raw is None else text.raw, row)

    def entropy(self, row: int) -> float:
        return self._figure(self.model.text.entropy, row)

    def draw(
        self, row: int, stream: RandomStream, minus: Span | None = None, without: Sequence[int] = ()
    ) -> Step[Drawn]:
        return Drawn(self.top[row], 1.0)
        yield  # a generator, as of any rows

    def __getattr__(self, name: str) -> Any:
        raise self._missing(f"{name} of its rows")

    def _figure(self, values: list[list[float]], row: int) -> float:
        if not self.places:
            raise self._missing("the target's confidence")
        self.model.figures += not self.asked
        self.asked = True
        place, element = self.places[row]
        return values[place][element]

    def _missing(self, what: str) -> NotInTrace:
        return NotInTrace(f"a replay has no {what}: this strategy must be measured instead")


class TraceModel(Model):
    """Target or draft of one text, with one slot.

    Args:
        text: source of all answers.
        role: target or draft.
        extend: after the end of a rollout repeat its last confidence and entropy with a token that
            matches nothing, instead of raising: counts stay right unless a stop policy or a stop
            token would have ended that draft.
        chains: answer `steps` as models do that decode a draft of fixed length in one command
            (`Forward`).
    """

    def __init__(self, text: TracedText, role: Role, *, extend: bool = False, chains: bool = False):
        self.text, self.role, self.extend, self.chains = text, role, extend, chains
        self.vocab_size, self.max_context = 2**31, 2**31
        self.extended = False
        self.figures = 0  # rows of which a value was read
        self.length = 0
        """Tokens in the slot."""
        self._left: int | None = None  # position of the first fed token that is not in the text

    def open(self, text: SlotText | None = None, prompt: Sequence[int] = ()) -> int:
        self.length, self._left = 0, None
        return 0

    def close(self, slot: int) -> None:
        pass

    def rollback(self, slot: int, length: int) -> None:
        self.length = length
        if self._left is not None and length <= self._left:
            self._left = None

    def open_branch(self) -> int:
        raise NotInTrace(
            "a trace holds one sequence per draft: measure strategies that draft several"
        )

    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        self.open_branch()

    def take_figures(self) -> int:
        """Rows of which a confidence, an entropy, a probability or a score was read since the last
        call."""
        taken, self.figures = self.figures, 0
        return taken

    def forward(self, rows: Sequence[Forward]) -> list[Span]:
        return [self.answer(row) for row in rows]

    def answer(self, row: Forward) -> Span:
        """One forward pass."""
        top: list[int] = []
        places: list[tuple[int, int]] = []
        unseen = len(row.tokens) - row.keep
        self._feed(row.tokens[:unseen])
        for token in row.tokens[unseen:]:
            self._feed((token,))
            self._add_row(top, places)
        ended = False
        for _ in range(row.steps - 1):
            if ended:
                self.length += 1
            else:
                self._feed((top[-1],))
                ended = self._left is None and self.length >= len(self.text.ids)
            # after the stop token of the text: a chain continues, and its rows are dropped
            if ended:
                top.append(OFF_TEXT)
                places.append(places[-1])
            else:
                self._add_row(top, places)
        return cast("Span", TraceSpan(top, places, self))

    def _feed(self, tokens: tuple[int, ...]) -> None:
        end = self.length + len(tokens)
        if self._left is None and self.text.ids[self.length : end] == list(tokens):
            self.length = end
            return
        for token in tokens:
            if self._left is None and (
                self.length >= len(self.text.ids) or self.text.ids[self.length] != token
            ):
                self._left = self.length
            if self._left is not None and self.role == "draft":
                self._check_own(token)
            self.length += 1

    def _add_row(self, top: list[int], places: list[tuple[int, int]]) -> None:
        """Add the row that follows the tokens in the slot."""
        if self.role == "target":
            known = self._left is None and self.length < len(self.text.ids)
            top.append(self.text.ids[self.length] if known else OFF_TEXT)
            return
        place, element = self._in_rollouts()
        top.append(self.text.tokens[place][element] if element >= 0 else OFF_TEXT)
        places.append((place, element))

    def _check_own(self, token: int) -> None:
        """Refuse a token off the text that the draft did not choose itself (an n-gram's, for
        example): nothing is known after it."""
        place, element = (
            (self._left or 0) - self.text.prompt_length,
            self.length - (self._left or 0),
        )
        known = self.text.tokens[place] if 0 <= place < len(self.text.tokens) else []
        if token != (known[element] if element < len(known) else OFF_TEXT):
            raise NotInTrace(
                "the draft was fed a token that is neither its own nor in "
                f"{self.text.name}: measure this strategy instead"
            )

    def _in_rollouts(self) -> tuple[int, int]:
        """Row of the trace and element of its rollout with the draft's next token; element −1 after
        the end."""
        left = self.length if self._left is None else self._left
        place, element = left - self.text.prompt_length, self.length - left
        if not 0 <= place < len(self.text.tokens):
            raise NotInTrace(
                f"the trace holds no rollout at position {place} of {self.text.name}: "
                "measure this strategy instead"
            )
        recorded = len(self.text.tokens[place])
        if element < recorded:
            return place, element
        if not self.extend:
            raise RolloutExhausted(element + 1, recorded)
        self.extended = True
        return place, -1
