"""What is decided on the rows of forward passes: probabilities of drafted tokens, tokens that are
drawn, and how far two models are apart. All requests that wait for a decision get theirs together,
as operations on tensors of all their rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftwell.serving.errors import NotFinite
from draftwell.serving.runtime.acceptance.divergence import divergences
from draftwell.serving.runtime.logits import (
    NOT_FINITE,
    Choice,
    Divergence,
    Draw,
    Drawn,
    Probs,
    Span,
    laws_of,
    spread,
)
from draftwell.serving.runtime.random_streams import RandomStream
from draftwell.serving.runtime.sampling import inverted, sum_rows

Drawer = Callable[[Tensor, Sequence[RandomStream]], Tensor]


def decide(asked: Sequence[Any], draw: Drawer | None = None) -> list[Any]:
    """The replies, in order; in the place of one whose rows are not finite, the error.

    Args:
        asked: `Probs`, `Draw`, `Choice` and `Divergence`.
        draw: as `by_inversion`, which it is where it is left out.
    """
    replies: list[Any] = [None] * len(asked)
    groups: dict[Any, list[int]] = {}
    for place, one in enumerate(asked):
        whole = one.rows.whole
        alike = id(whole.support), whole.values.shape[1], whole.values.device
        groups.setdefault((type(one), *alike), []).append(place)
    for (kind, *_), places in groups.items():
        some: Any = [asked[place] for place in places]
        if kind is Draw:
            found: list[Any] = drawn(some, draw or by_inversion)
        elif kind is Choice:
            found = choices_of(some)
        else:
            found = probs_of(some) if kind is Probs else divergences_of(some)
        for place, reply in zip(places, found, strict=True):
            replies[place] = reply if finite(reply) else NotFinite(NOT_FINITE)
    return replies


def finite(reply: float | list[float] | Drawn) -> bool:
    """Whether no probability is NaN, which all of a row are where a logit is NaN or +∞."""
    numbers = [reply] if isinstance(reply, float) else reply
    return not any(math.isnan(number) for number in numbers)


def probs_of(asked: Sequence[Probs]) -> list[list[float]]:
    """Of each command its tokens' probabilities, which one transfer fetches."""
    whole = asked[0].rows.whole
    rows: list[Span] = []
    places: list[int] = []
    for one in asked:
        for i, place in enumerate(one.rows.places):
            if i == 0 or place != one.rows.places[i - 1]:  # several tokens may be of one row
                rows.append(one.rows[i])
            places.append(len(rows) - 1)
    laws = spread(laws_of(rows), whole.support, whole.vocab_size)
    found = iter(laws[places, [token for one in asked for token in one.tokens]].tolist())
    return [[next(found) for _ in one.tokens] for one in asked]


def drawn(asked: Sequence[Draw], draw: Drawer) -> list[Drawn]:
    """A token for each command, with its probability."""
    laws = laws_of([one.rows for one in asked])
    left = laws
    if any(one.minus is not None or one.without for one in asked):
        left = remainders(laws, asked)
    columns = draw(left, [one.stream for one in asked])
    support = asked[0].rows.whole.support
    tokens = columns if support is None else support[columns]
    probs = laws.gather(1, columns[:, None])[:, 0]
    # one transfer: float64 holds every token's number
    found = torch.stack([tokens.double(), probs.double()]).tolist()
    return [Drawn(int(token), prob) for token, prob in zip(*found, strict=True)]


def choices_of(asked: Sequence[Choice]) -> list[Drawn]:
    """The winner of each command's race, with its probability."""
    laws = laws_of([one.rows for one in asked])
    tokens, found = asked[0].rows.whole.columns, []
    for law, one in zip(laws.cpu().numpy(), asked, strict=True):  # one transfer
        column = one.rows.leading_columns(0, law=law)[0][0]
        found.append(Drawn(column if tokens is None else int(tokens[column]), float(law[column])))
    return found


def divergences_of(asked: Sequence[Divergence]) -> list[float]:
    """Of each command its divergence."""
    p = torch.stack([one.rows.raw(0) for one in asked])
    q = torch.zeros_like(p)
    for row, one in zip(q, asked, strict=True):
        if one.draft is None:
            row[one.token] = 1.0
        else:
            row.copy_(one.draft.raw(0))
    tokens = torch.tensor([one.token for one in asked], device=p.device)
    names: list[Any] = [one.name for one in asked]
    found = {name: divergences(name, p, q, tokens).tolist() for name in {*names}}
    return [found[name][place] for place, name in enumerate(names)]


def by_inversion(laws: Tensor, streams: Sequence[RandomStream]) -> Tensor:
    """A column `[n]` drawn from each row of `laws` `[n, columns]` (need not be normalised), by
    inversion of one uniform of each stream."""
    uniforms = torch.tensor([stream.uniform() for stream in streams], dtype=torch.float64)
    return inverted(laws, uniforms.to(laws.device))


def remainders(laws: Tensor, asked: Sequence[Draw]) -> Tensor:
    """What is left of each law `[n, columns]`: max(0, p − q), or p without some tokens, not
    normalised; p itself where rounding leaves no mass (Leviathan 2023, section 2.3)."""
    left = laws.clone()
    for row, one in zip(left, asked, strict=True):
        if one.minus is not None:
            support, taken = one.minus.whole.support, laws_of([one.minus])[0].to(row.device)
            if support is None:
                row -= taken
            else:
                row.index_add_(0, support.to(row.device), taken, alpha=-1)
        for token in one.without:
            if (column := one.rows.whole.column(token)) is not None:
                row[column] = 0.0
    left.clamp_(min=0.0)
    return torch.where(sum_rows(left)[:, None] > 0.0, left, laws)
