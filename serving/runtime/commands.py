"""What a strategy asks of the engine: forward passes, decisions on their rows, and generators that
run at once.

A strategy is a generator. It yields `Forward` (or `Overlap` of generators) and is sent a `Span` of
rows; it yields a `Decision` for what a sampled request wants to know of rows, and all
requests are answered together. Everything else it does is plain Python on plain data. The engine
alone decides where, when and with whom a forward pass runs.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["target", "draft", "qualifier", "head", "draft_onnx", "shadow"]
"""What a model is to its pair. `head` drafts from the target's hidden states (EAGLE-3);
`draft_onnx` is the draft in ONNX Runtime, loaded for strategies that prefer it."""
SHADOW: Literal["shadow"] = "shadow"
"""The draft where it only reads along (serving/recording/shadow.py)."""
T = TypeVar("T")


@dataclass(frozen=True)
class Forward:
    """Feed `tokens` to `model`'s slot and return the last `keep` rows of logits.

    Args:
        model: role of the model within the pair.
        slot: the slot that the engine opened for this request.
        tokens: tokens after the slot's current end, at least one.
        keep: number of trailing positions whose logits are wanted, at most `len(tokens)`.
        prefill: the request's first on this model, which reads what its slot does not hold of the
            prompt; such a forward pass is timed and counted apart.
        steps: rows to return, the last of `tokens` and so many less one tokens that follow it
            greedily, each chosen by the largest logit where the model computes; above 1 for models
            with `chains` alone, and with `keep` = 1.
        parents: the tokens are a tree: of each the place in `tokens` of the one that it follows, −1
            for one that follows the slot's content; a parent comes before its children. A token
            sees the slot's content, its ancestors and itself, and its position is its depth. For
            models with `trees` alone; None: each token follows the one before it. `Lane.settle`
            then keeps one path.
        skip: sublayers that are left out: 2·i is the attention of layer i, 2·i + 1 its
            feed-forward. For models with `skips` alone. What is written of such tokens into the
            slot does not stand for them: they are read again in full (`Lane.skim`).
        rates: all tokens are the prompt's and all rows are wanted, to rate it: the engine may read
            them in pieces, and joins the rows.
        features: `[tokens, width]` what a head reads with its tokens: the target's hidden states or
            the head's own; None for others.
    """

    model: Role
    slot: int
    tokens: tuple[int, ...]
    keep: int = 1
    prefill: bool = False
    steps: int = 1
    parents: tuple[int, ...] | None = None
    skip: frozenset[int] = frozenset()
    rates: bool = False
    features: Tensor | None = field(default=None, compare=False)


class Decision:
    """A question about rows of forward passes (`logits`), which the engine answers for all requests
    at once."""


class Overlap:
    """Generators that run at once; the reply is the tuple of their return values.

    Sides that wait for the same model are run as one batch, sides that wait for different models
    side by side.
    """

    def __init__(self, *sides: Generator[Any, Any, Any]):
        self.sides = sides


Step = Generator[Forward | Overlap | Decision, Any, T]
"""A generator of commands that ends with a value of type T."""
