"""What a model is to the engine: forward passes over slots in, logits out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.logits import Span

if TYPE_CHECKING:
    from torch import Tensor

    from draftwell.serving.runtime.slot_texts import SlotText


class Recorder(Protocol):
    """Sees what the models of one request say."""

    def saw(self, role: Role, sequence: Sequence[int], span: Span, steps: int) -> None:
        """A forward pass of draft or target is over; must not raise.

        Args:
            sequence: text and draft that the model has read now; its list may grow, what is in it
                stays.
            span: what it says at its last positions, each about the token that comes next.
            steps: as in `Forward`: after `sequence` the model has read its own greedy tokens, one
                fewer.
        """


class Model(ABC):
    """A model over slots, and what it can do.

    A slot is one request's view: tokens are fed in order, `rollback` forgets the last ones.
    """

    vocab_size: int
    max_context: int
    slots: Any
    """`models.slots.Slots`."""
    device: torch.device = torch.device("cpu")
    exact: bool = False
    """A token's logits depend on its own text alone, to the bit: not on what runs beside it, nor on
    how its text is cut."""
    trees: bool = False
    """`forward` reads `Forward.parents`."""
    skips: bool = False
    """`forward` reads `Forward.skip`, for `sublayers`."""
    sublayers: int = 0
    chains: bool = False
    """`forward` reads `Forward.steps` above 1."""
    keeps_states: bool = False
    """Hidden states can be kept for a head (`TransformersModel.keep_hidden_states`)."""
    captures: bool = False
    """Forward passes are CUDA graphs, on a stream of the model's own."""
    marks: Any = None
    """When the last forward pass began and ended on the device, where the clock does not say it."""
    head_tokens: Tensor | None = None
    """`[head]` ids that the head covers; None: all."""
    stand_ins: Mapping[int, int] = MappingProxyType({})
    """Ids of the target that the model lacks → what it reads in their place (vocabulary.py)."""

    left_out: Mapping[Role, str] = MappingProxyType({})
    """Of a target: models of its pair that cannot run beside it, and why."""

    def as_read(self, rows: Sequence[Forward]) -> Sequence[Forward]:
        """Rows with the ids that the model reads."""
        if not self.stand_ins:
            return rows
        return [
            replace(row, tokens=tuple(self.stand_ins.get(token, token) for token in row.tokens))
            for row in rows
        ]

    @abstractmethod
    def open(self, text: SlotText | None = None, prompt: Sequence[int] = ()) -> int:
        """Take a free slot: of length 0, or, where a text with an owner is given, with a part of
        the prompt (`Slots.open`)."""

    @abstractmethod
    def close(self, slot: int) -> None:
        """Give the slot back."""

    @abstractmethod
    def rollback(self, slot: int, length: int) -> None:
        """Forget everything after the first `length` tokens of a slot."""

    @abstractmethod
    def open_branch(self) -> int:
        """Take a slot for a further sequence of a request that has a slot already; there is always
        one."""

    @abstractmethod
    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        """Make slot `into` hold the first `length` tokens of slot `source`, and nothing else; the
        first `known` it holds already."""

    @abstractmethod
    def forward(self, rows: Sequence[Forward]) -> list[Span]:
        """Run all rows as one ragged batch, at most one row per slot; what each asked to keep."""

    def token_cost(self, position: int) -> float:
        """What the token of a prompt at a position takes, in first tokens of a prompt."""
        return 1.0
