"""Models that answer from a trace: the strategies' own generators run over them, and no weights are read.

At temperature 0 a lossless strategy's text is the target's own, whatever the draft does. So along the text the target's
next token is known; and the draft, fed tokens that leave the text at position d, has continued its own choice at d: its
next token is in the rollout recorded there. Nothing else is ever looked at, which makes a replay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.runtime.types import DraftwellError, Forward, Output, Role, Sampling, Stream

NO_LOGITS = torch.empty(0)
OFF_TEXT = -1
"""The token of a row that no strategy looks at: the target's behind a draft token that the text does not hold."""


class RolloutExhausted(DraftwellError):
    """A draft ran on behind its first wrong token for longer than the trace's rollouts.

    Args:
        needed: length of rollout that this forward would have needed.
        recorded: K of the trace.
    """

    def __init__(self, needed: int, recorded: int):
        self.needed, self.recorded = needed, recorded
        super().__init__(f"the draft ran {needed} tokens behind its last right one, the trace holds rollouts of {recorded}: draft "
                         "fewer tokens, or collect with a longer rollout")


class NotInTrace(DraftwellError):
    """A strategy asked for something that a trace does not hold."""


@dataclass(frozen=True)
class TracedText:
    """A text and the draft's rollouts along it.

    Args:
        ids: prompt and continuation.
        prompt_length: tokens of the prompt.
        tokens, confidence, entropy: `[continuation][K]`, the draft's greedy continuation of `ids[: prompt_length + i]`.
    """

    name: str
    ids: list[int]
    prompt_length: int
    tokens: list[list[int]]
    confidence: list[list[float]]
    entropy: list[list[float]]

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.prompt_length]

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_length :]


@dataclass
class TraceRows:
    """Rows of a trace: the likeliest token of each and, of the draft's, confidence and entropy."""

    top: list[int]
    confidences: list[float]
    entropies: list[float]
    sampling: Sampling

    def __len__(self) -> int:
        return len(self.top)

    def confidence(self, row: int) -> float:
        return self._draft(self.confidences)[row]

    def raw_prob(self, row: int, token: int) -> float:
        if token != self.top[row]:
            raise self._missing("probability of a token that the draft does not like best")
        return self.confidence(row)

    def entropy(self, row: int) -> float:
        return self._draft(self.entropies)[row]

    def sample(self, row: int, stream: Stream) -> int:
        return self.top[row]

    def probs(self, row: int) -> Tensor:
        raise self._missing("probabilities")

    def raw(self, row: int) -> Tensor:
        raise self._missing("probabilities")

    def raw_logit(self, row: int, token: int) -> float:
        raise self._missing("logits")

    def hidden(self, row: int) -> Tensor:
        raise self._missing("hidden states")

    def _draft(self, values: list[float]) -> list[float]:
        if not values:
            raise self._missing("the target's confidence")
        return values

    def _missing(self, what: str) -> NotInTrace:
        return NotInTrace(f"a replay has no {what}: this strategy must be measured instead")


class TraceOutput(Output):
    """The kept positions of a forward over a trace."""

    def __init__(self, top: list[int], confidences: list[float], entropies: list[float]):
        super().__init__(NO_LOGITS)
        self._values = (top, confidences, entropies)

    def rows(self, sampling: Sampling, written: Sequence[int] = ()) -> TraceRows:
        if sampling.penalises or sampling.biases:
            raise NotInTrace("a replay has no logits to penalise or bias: measure this request instead")
        if not sampling.greedy:
            raise NotInTrace(f"replay is exact at temperature 0 only, not {sampling.temperature}: measure instead")
        return TraceRows(*self._values, sampling)


class TraceModel:
    """Target or draft of one text, with one slot.

    Args:
        text: what to answer from.
        role: target or draft.
        extend: behind the end of a rollout repeat its last confidence and entropy with a token that matches nothing,
            instead of raising: counts stay right unless a stop policy or a stop token would have ended that draft.
    """

    def __init__(self, text: TracedText, role: Role, *, extend: bool = False):
        self.text, self.role, self.extend = text, role, extend
        self.vocab_size, self.max_context = 2**31, 2**31
        self.extended = False
        self._length = 0
        self._left: int | None = None  # position of the first fed token that the text does not hold

    def open(self) -> int:
        self._length, self._left = 0, None
        return 0

    def close(self, slot: int) -> None:
        pass

    def rollback(self, slot: int, length: int) -> None:
        self._length = length
        if self._left is not None and length <= self._left:
            self._left = None

    def open_branch(self) -> int:
        raise NotInTrace("a trace holds one sequence a draft: measure strategies that draft several")

    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        raise NotInTrace("a trace holds one sequence a draft: measure strategies that draft several")

    def forward(self, rows: Sequence[Forward]) -> list[Output]:
        return [self._forward(row) for row in rows]

    def _forward(self, row: Forward) -> Output:
        ids, first = self.text.ids, len(row.tokens) - row.keep
        top: list[int] = []
        confidence: list[float] = []
        entropy: list[float] = []
        for i, token in enumerate(row.tokens):
            if self._left is None and (self._length >= len(ids) or ids[self._length] != token):
                self._left = self._length
            if self._left is not None and self.role == "draft":
                self._check_own(token)
            self._length += 1
            if i < first:
                continue
            if self.role == "target":
                known = self._left is None and self._length < len(ids)
                top.append(ids[self._length] if known else OFF_TEXT)
            else:
                place, element = self._in_rollouts()
                top.append(self.text.tokens[place][element] if element >= 0 else OFF_TEXT)
                confidence.append(self.text.confidence[place][element])
                entropy.append(self.text.entropy[place][element])
        return TraceOutput(top, confidence, entropy)

    def _check_own(self, token: int) -> None:
        """Refuse a token beside the text that the draft did not choose itself (from an n-gram, say): nothing is known behind it."""
        place, element = (self._left or 0) - self.text.prompt_length, self._length - (self._left or 0)
        known = self.text.tokens[place] if 0 <= place < len(self.text.tokens) else []
        if token != (known[element] if element < len(known) else OFF_TEXT):
            raise NotInTrace(f"the draft was fed a token that is neither its own nor in {self.text.name}: measure this strategy")

    def _in_rollouts(self) -> tuple[int, int]:
        """Row of the trace and element of its rollout that say what the draft puts next; element −1 behind the end."""
        left = self._length if self._left is None else self._left
        place, element = left - self.text.prompt_length, self._length - left
        if not 0 <= place < len(self.text.tokens):
            raise NotInTrace(f"the draft was asked behind position {place} of {self.text.name}, which the trace does not hold")
        recorded = len(self.text.tokens[place])
        if element < recorded:
            return place, element
        if not self.extend:
            raise RolloutExhausted(element + 1, recorded)
        self.extended = True
        return place, -1
