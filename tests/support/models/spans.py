"""Rows of a forward pass, made from logits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

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
