"""A distribution over the next token from the text alone: what followed its last n-grams earlier,
longer ones first.

The orders are blended as in prediction by partial matching, method C (Moffat 1990): where the last
n tokens occurred before, each continuation x gets count(x) / (total + distinct) of the mass that
longer n-grams left, and distinct / (total + distinct) of it passes to shorter ones. What no order
takes is the mass of all that was never seen. So a continuation that was seen once after four tokens
is worth more than one after a single token, and confidence and entropy mean what they mean for a
model.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

MOST = 32
"""Latest earlier places of an n-gram that are counted."""


class Guess(NamedTuple):
    """The likeliest next token.

    Args:
        token: its id.
        confidence: its probability, 0 to 1.
        entropy: of the distribution, in nats; all that was never seen counts as one outcome.
    """

    token: int
    confidence: float
    entropy: float


def guess(ids: Any, longest: int) -> Guess | None:
    """The likeliest next token; None where nothing that ends the text occurred earlier.

    Args:
        ids: [tokens] integers of the text.
        longest: n-grams of 1 to so many tokens are looked up.

    >>> found = guess(np.array([1, 2, 3, 9, 1, 2]), longest=2)
    >>> found.token, round(found.confidence, 2)
    (3, 0.75)
    """
    orders = places(ids, longest)
    if not orders:
        return None
    probs: dict[int, float] = {}
    mass = 1.0
    for at in orders:
        counts: dict[int, int] = {}
        for token in ids[at + 1].tolist():
            counts[token] = counts.get(token, 0) + 1
        whole = len(at) + len(counts)
        for token, count in counts.items():
            probs[token] = probs.get(token, 0.0) + mass * count / whole
        mass *= len(counts) / whole
    best = max(probs.values())
    near = {token for token, prob in probs.items() if prob > best - 1e-9}
    # of equal ones what came last
    token = next(one for at in orders for one in reversed(ids[at + 1].tolist()) if one in near)
    entropy = -sum(prob * math.log(prob) for prob in (*probs.values(), mass) if prob > 0)
    return Guess(token, best, entropy)


def places(ids: Any, longest: int) -> list[Any]:
    """Where the last n tokens ended earlier, ascending, at most `MOST` of them, for each n from the
    longest that occurred down."""
    length = len(ids)
    if length < 2:
        return []
    at = np.flatnonzero(ids[: length - 1] == ids[length - 1])
    found = []
    for n in range(1, longest + 1):
        if n > 1:
            at = at[at >= n - 1]
            at = at[ids[at - (n - 1)] == ids[length - n]]
        if len(at) == 0:
            break
        found.append(at[-MOST:])
    return found[::-1]
