"""Models whose next token depends on every token before it, and checks of what their slots are said
to hold."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftwell.serving.runtime.commands import Forward
from tests.support.models.resources import table_pair
from tests.support.models.table_model import TableModel


class WholeText(TableModel):
    """A table, and noise that any other token anywhere in the text changes."""

    def next_logits(self, context: Sequence[int]) -> Tensor:
        noises = noises_of(self.vocab_size)
        return super().next_logits(context) + noises[hash(tuple(context)) % len(noises)]


@functools.cache
def noises_of(vocab: int) -> Tensor:
    return 1.5 * torch.randn(9973, vocab, generator=torch.Generator().manual_seed(0))


def whole_text_pair(vocab: int = 8, slots: int = 4) -> dict[str, Any]:
    """As `table_pair`."""
    return {role: WholeText(model.table, slots=slots) for role, model in table_pair(vocab).items()}


def check_held(models: Mapping[str, TableModel]) -> None:
    """Every slot holds the tokens that are listed for it."""
    for role, model in models.items():
        for slot in range(model.slots.count):
            if slot in model.slots.texts:
                listed = model.slots.texts[slot].tokens
                assert listed == model.tokens[slot][: model.slots.lengths[slot]][: len(listed)], (
                    role,
                    slot,
                )


def tokens_read(models: Mapping[str, Any], *, prompts_only: bool = False) -> dict[str, list[int]]:
    """Role → tokens of every row that its model runs from here on.

    Args:
        prompts_only: leave out rows that are not part of a request's first forward pass on the
            model.
    """
    found: dict[str, list[int]] = {role: [] for role in models}

    def watch(role: str, model: Any) -> None:
        run = model.forward

        def forward(rows: Sequence[Forward]) -> Any:
            found[role] += [len(row.tokens) for row in rows if row.prefill or not prompts_only]
            return run(rows)

        model.forward = forward

    for role, model in models.items():
        watch(role, model)
    return found
