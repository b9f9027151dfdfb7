"""What a model is to the engine: forward passes over slots in, distributions out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import LikeliestTokens, LogitRows, spread
from draftwell.serving.runtime.types import Rows

if TYPE_CHECKING:
    from torch import Tensor

    from draftwell.serving.runtime.slot_texts import SlotText


class Output:
    """What a forward pass returns: distributions and last hidden states of the kept positions.

    A model whose head covers a part of the vocabulary gives the logits of that part; all others are
    −∞.

    Args:
        compact: `[keep, columns]` logits as the model gives them; kept, and worked on, in float32.
        hidden: `[keep, hidden]`, normalised last hidden states, or None where the model has none.
        support: `[columns]` ascending ids of the tokens that the columns are for; None: column i is
            token i.
        vocab_size: of the pair, needed with `support`.
    """

    def __init__(
        self,
        compact: Tensor,
        hidden: Tensor | None = None,
        support: Tensor | None = None,
        vocab_size: int = 0,
    ):
        # in a narrower dtype sums and ratios of probabilities would be rounded to it
        self.compact = compact.float()
        self.hidden, self.support, self.vocab_size = hidden, support, vocab_size
        self._logits: Tensor | None = None
        # of the whole forward pass, and the place of the first row there
        self._likeliest: tuple[LikeliestTokens, int] | None = None

    @property
    def logits(self) -> Tensor:
        """`[keep, vocab]` float32, made when first looked at."""
        if self._logits is None:
            self._logits = spread(self.compact, self.support, self.vocab_size, -math.inf)
        return self._logits

    def __len__(self) -> int:
        return int(self.compact.shape[0])

    def last(self, count: int) -> Output:
        """The last `count` of the kept positions."""
        return self.part(len(self) - count, len(self)) if count < len(self) else self

    def part(self, start: int, end: int) -> Output:
        """The kept positions from `start` up to `end`."""
        states = None if self.hidden is None else self.hidden[start:end]
        part = Output(self.compact[start:end], states, self.support, self.vocab_size)
        if self._likeliest is not None:
            part.share(self._likeliest[0], self._likeliest[1] + start)
        return part

    def at(self, positions: Sequence[int]) -> Output:
        """Some of the kept positions, by number."""
        numbers = list(positions)
        return Output(
            self.compact[numbers],
            None if self.hidden is None else self.hidden[numbers],
            self.support,
            self.vocab_size,
        )

    def share(self, likeliest: LikeliestTokens, at: int) -> None:
        """Take the likeliest tokens from those of a whole forward pass, in which row `at` is the
        first one here."""
        self._likeliest = likeliest, at

    def top(self) -> list[int]:
        """The likeliest token of each row, before anything that a request asks for; −1 for a row
        that is not usable."""
        if self._likeliest is None:
            self.share(LikeliestTokens(self.compact, self.support), 0)
        assert self._likeliest is not None
        found, at = self._likeliest
        return found.of(at, at + len(self))

    def rows(self, sampling: Sampling, written: Sequence[int] | Penalties = ()) -> Rows:
        """The kept positions under a request's sampling parameters.

        Args:
            written: output and draft tokens before the token that the last row predicts, for
                penalties, or the request's `Penalties`, which follow them; the row before it counts
                one token fewer, and so on.
        """
        # they name tokens, of which some may have no column
        if sampling.banned_token_ids or sampling.biases or sampling.penalises:
            return LogitRows(self.logits, sampling, self.hidden, written)
        return LogitRows(
            self.compact,
            sampling,
            self.hidden,
            support=self.support,
            vocab_size=self.vocab_size,
            top=self.top,
        )


def joined(outputs: Sequence[Output]) -> Output:
    """The kept positions of several forward passes of one model, one after another."""
    first, states = outputs[0], [output.hidden for output in outputs if output.hidden is not None]
    return Output(
        torch.cat([output.compact for output in outputs]),
        torch.cat(states) if states else None,
        first.support,
        first.vocab_size,
    )


def share_top(outputs: list[Output]) -> list[Output]:
    """Let the outputs of one forward pass find their likeliest tokens together, where their logits
    are consecutive rows of one tensor."""
    if len(outputs) < 2 or outputs[0].compact.dim() != 2:
        return outputs
    first = outputs[0].compact
    at, width = first.storage_offset(), first.stride(0)
    for output in outputs:
        logits = output.compact
        if (
            logits.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or output.support is not outputs[0].support
            or (logits.shape[1:], logits.stride(), logits.storage_offset())
            != (first.shape[1:], first.stride(), at)
        ):
            return outputs
        at += len(output) * width
    together = LikeliestTokens(
        first.as_strided((sum(map(len, outputs)), first.shape[1]), first.stride()),
        outputs[0].support,
    )
    at = 0
    for output in outputs:
        output.share(together, at)
        at += len(output)
    return outputs


class Recorder(Protocol):
    """Sees what the models of one request say."""

    def saw(self, role: Role, sequence: Sequence[int], output: Output, steps: int) -> None:
        """A forward pass of draft or target is over; must not raise.

        Args:
            sequence: text and draft that the model has read now; its list may grow, what is in it
                stays.
            output: what it says at its last positions, each about the token that comes next.
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
    def forward(self, rows: Sequence[Forward]) -> list[Output]:
        """Run all rows as one ragged batch; at most one row per slot."""

    def token_cost(self, position: int) -> float:
        """What the token of a prompt at a position takes, in first tokens of a prompt."""
        return 1.0
