"""A model with known probabilities: logits are a table indexed by the last tokens of the context.

Losslessness is proved on it by enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.slot_texts import SlotText
from draftwell.serving.runtime.trees import DraftTree
from tests.support.models.spans import all_rows


class TableModel(Model):
    """Logits of the next token from the last `order` tokens.

    Args:
        table: `[vocab] * (order + 1)` float32 logits; contexts shorter than `order` are padded with
            token 0.
    """

    def __init__(self, table: Tensor, *, slots: int = 8, max_context: int = 512):
        self.table = table
        self.order = table.ndim - 1
        self.vocab_size = table.shape[-1]
        self.max_context = max_context
        self.slots = Slots([], slots, max_context, torch.float32, torch.device("cpu"))
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        # `Forward.skip` of the pass that read each of them
        self._skipped: list[list[frozenset[int]]] = [[] for _ in range(slots)]
        self._noises: dict[frozenset[int], Tensor] = {}

    @classmethod
    def random(
        cls, vocab_size: int, seed: int, *, order: int = 2, sharpness: float = 2.0, slots: int = 8
    ) -> Self:
        """A table of normal logits with the given standard deviation."""
        generator = torch.Generator().manual_seed(seed)
        return cls(
            torch.randn([vocab_size] * (order + 1), generator=generator) * sharpness, slots=slots
        )

    def open(self, text: SlotText | None = None, prompt: Sequence[int] = ()) -> int:
        return self.slots.open(text, prompt)

    def close(self, slot: int) -> None:
        self.slots.close(slot)

    def rollback(self, slot: int, length: int) -> None:
        self.slots.rollback(slot, length)

    def open_branch(self) -> int:
        slot = self.slots.open_branch()
        self.tokens += [[] for _ in range(len(self.tokens), slot + 1)]
        self._skipped += [[] for _ in range(len(self._skipped), slot + 1)]
        return slot

    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        self.slots.fork(source, into, length, known)
        self.tokens[into] = self.tokens[into][:known] + self.tokens[source][known:length]
        self._skipped[into] = self._skipped[into][:known] + self._skipped[source][known:length]

    trees = True
    skips = True
    sublayers = 12

    def keep(self, slot: int, length: int, path: Sequence[int]) -> None:
        for memory in (self.tokens, self._skipped):
            known: list[Any] = memory[slot]
            memory[slot] = [*known[:length], *(known[length + place] for place in path)]
        self.slots.keep(slot, length, path)

    def hidden_states(self, slot: int, start: int, end: int) -> Tensor:
        """Nothing that a head could use: one that is a table too does not look at it."""
        return torch.zeros(end - start, 1)

    def head_rows(self, tokens: Tensor) -> Tensor:
        """`[n, vocab]`: its hidden states are logits, so its output embedding is the identity."""
        return torch.eye(self.vocab_size)[tokens]

    def next_logits(self, context: Sequence[int]) -> Tensor:
        """Logits `[vocab]` after a context."""
        last = [0] * self.order + list(context)
        return self.table[tuple(last[len(last) - self.order :])]

    def forward(self, rows: Sequence[Forward]) -> list[Span]:
        outputs = []
        for row in rows:
            if not 1 <= row.keep <= len(row.tokens):
                raise ValueError(
                    f"{row.keep} rows of {len(row.tokens)} tokens: a forward pass keeps at "
                    "least one, at most all it feeds"
                )
            start = self.slots.reserve(row.slot, len(row.tokens))
            known = self.tokens[row.slot][:start] + list(row.tokens)
            self.tokens[row.slot] = known
            self._skipped[row.slot] = self._skipped[row.slot][:start] + [row.skip] * len(row.tokens)
            if row.parents is None:
                contexts = [known[: len(known) - i] for i in reversed(range(row.keep))]
            else:
                tree = DraftTree(list(row.tokens), list(row.parents))
                paths = [tree.path(i) for i in range(len(tree) - row.keep, len(tree))]
                contexts = [known[:start] + [row.tokens[place] for place in path] for path in paths]
            logits = torch.stack([self.next_logits(context) for context in contexts])
            # an earlier pass's too, as with keys and values
            for skip in {*self._skipped[row.slot][max(0, start - self.order) :]} - {frozenset()}:
                logits += self._noise(skip)
            outputs.append(all_rows(logits, logits.clone()))
        return outputs

    def _noise(self, skip: frozenset[int]) -> Tensor:
        """What skipping sublayers adds to the logits `[vocab]`, the same each time."""
        if skip not in self._noises:
            generator = torch.Generator().manual_seed(sum(1 << one for one in skip))
            self._noises[skip] = torch.randn(self.vocab_size, generator=generator)
        return self._noises[skip]
