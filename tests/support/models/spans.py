"""Rows of a forward pass, made from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.engine.decisions import decide
from draftwell.serving.runtime.logits import Logits, Span
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.requests import Sampling


def span_of(
    logits: Tensor,
    sampling: Sampling | None = None,
    hidden: Tensor | None = None,
    written: Sequence[int] | None = None,
) -> Span:
    """All rows `[rows, vocab]` under a request's sampling parameters.

    Args:
        written: output and draft tokens before the token that the last row predicts.
    """
    asked = sampling or Sampling()
    changes = None if written is None else Penalties(asked).follow(written)
    return Span.of(Logits(logits, hidden)).under(asked, changes)


def all_rows(
    values: Tensor,
    hidden: Tensor | None = None,
    support: Tensor | None = None,
    vocab_size: int = 0,
) -> Span:
    """What a forward pass returns for one request, before it is asked for sampling parameters."""
    return Span.of(Logits(values, hidden, support, vocab_size))


def one_by_one(laws: Tensor, streams: Sequence[Any]) -> Tensor:
    """Columns drawn by each stream itself, which may be an oracle."""
    return torch.tensor([stream.draw(law) for law, stream in zip(laws, streams, strict=True)])


def decided(steps: Step[Any]) -> Any:
    """What steps that ask for nothing but decisions return."""
    try:
        command = next(steps)
        while True:
            (reply,) = decide([command], one_by_one)  # type: ignore[list-item]
            if isinstance(reply, Exception):
                raise reply
            command = steps.send(reply)
    except StopIteration as stop:
        return stop.value


def sampled(rows: Span, row: int, stream: Any) -> int:
    """A token drawn from a row by a stream."""
    token: int = decided(rows.draw(row, stream)).token
    return token
