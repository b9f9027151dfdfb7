"""What the published loops share: distributions read anew from whole texts, random decisions by
script, and what a loop returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.models.enumeration import Oracle
from tests.support.models.table_model import TableModel


class Round(NamedTuple):
    """One call of the target: tokens that were drafted for it or meanwhile, that it judged, and
    that it kept."""

    drafted: int
    judged: int
    accepted: int


@dataclass
class Decoded:
    """What a loop returns.

    Args:
        text: without the prompt; as long as the loop makes it, which may be more than was asked
            for.
        rounds: one for each call of the target.
        unverified: tokens at the end of `text` that the target never judged.
    """

    text: list[int]
    rounds: list[Round]
    unverified: int = 0


class Reader:
    """A model that forgets everything between calls.

    Args:
        model: a table, or a causal language model of transformers.
    """

    def __init__(self, model: Any, temperature: float = 0.0):
        self.model, self.temperature = model, temperature
        # answers for equal texts; a text is always read whole
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def read(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits `[vocab]` of the next token, and the last hidden state."""
        key = tuple(ids)
        if key not in self._known:
            if isinstance(self.model, TableModel):
                logits = self.model.next_logits(ids)
                self._known[key] = logits, logits
            else:
                with torch.no_grad():
                    output = self.model(torch.tensor([key]), output_hidden_states=True)
                self._known[key] = output.logits[0, -1], output.hidden_states[-1][0, -1]
        return self._known[key]

    def probs(self, ids: Sequence[int]) -> Tensor:
        """The distribution that is sampled from: one-hot at temperature 0."""
        logits = self.read(ids)[0]
        if self.temperature > 0:
            return (logits / self.temperature).softmax(-1)
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()

    def best(self, ids: Sequence[int]) -> int:
        return int(self.read(ids)[0].argmax())


def draft(
    model: Reader, source: Oracle, ids: list[int], length: int
) -> tuple[list[int], list[Tensor]]:
    """`length` sampled tokens, and the distribution of each."""
    tokens: list[int] = []
    probs: list[Tensor] = []
    for _ in range(length):
        probs.append(model.probs(ids + tokens))
        tokens.append(source.draw(probs[-1]))
    return tokens, probs


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p − q))."""
    left = (p - q).clamp(min=0)
    return left / left.sum()


def greedy() -> Oracle:
    """Decisions of a loop whose distributions are all one-hot."""
    return Oracle([])
