"""What a forward pass says: one tensor of logits, of which every request that it ran for has a span
of rows.

The likeliest token of a row, its raw distribution, confidence, entropy and ranks are computed of
all rows of the pass at once, when the first request asks: one operation, and on a device one wait,
for all of them. (A head whose columns are a text's own gives each request a pass of its own.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwell.serving.artifacts.verifier import TokenFigures
from draftwell.serving.errors import DraftwellError, NotFinite
from draftwell.serving.runtime.commands import Decision, Step
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.random_streams import Race, RandomStream, leaders
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import adjusted, likeliest, sum_rows, warp

NOT_FINITE = "a model returned NaN or infinite logits: check its weights and dtype"
GREEDY = Sampling()
"""Of rows that no request has altered."""


class Rating(NamedTuple):
    """What the target thinks of a token: natural logarithms of its raw probabilities (temperature
    1, bans applied, before penalties, biases, top-k and top-p), whatever the strategy."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens of the position with theirs, best first."""


@dataclass(frozen=True, eq=False)
class Probs(Decision):
    """Warped probabilities of a token for each row; the reply is a list of them."""

    rows: Span
    tokens: Sequence[int]


@dataclass(frozen=True, eq=False)
class Draw(Decision):
    """Draw a token from the warped distribution p of a row, by one uniform of a stream; the reply
    is a `Drawn`.

    Args:
        rows: one row.
        minus: a row of another model, whose warped distribution q is taken away: the token follows
            norm(max(0, p − q)), or p where rounding leaves no mass (Leviathan 2023, section 2.3).
        without: tokens that are ruled out first; p where nothing else has mass.
    """

    rows: Span
    stream: RandomStream
    minus: Span | None = None
    without: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Choice(Decision):
    """The token that a coupled request draws from the warped distribution of a row, whoever asks;
    the reply is a `Drawn`.

    Args:
        rows: one row.
    """

    rows: Span


@dataclass(frozen=True, eq=False)
class Divergence(Decision):
    """How far the raw distributions of two rows are apart; the reply is a number in [0, inf].

    Args:
        name: which divergence (`acceptance.divergence`).
        rows: one row, of the judge.
        draft: the proposer's row; None: it proposed `token` deterministically.
        token: the proposed one.
    """

    name: str
    rows: Span
    draft: Span | None
    token: int


class Drawn(NamedTuple):
    """A token that was drawn, and its probability in p."""

    token: int
    prob: float


class Logits:
    """The rows of one forward pass, over the tokens that the model's head covers; all others are
    at −∞.

    Args:
        values: `[rows, columns]` as the model gives them; kept, and worked on, in float32.
        hidden: `[rows, hidden]`, normalised last hidden states, or None where the model has none.
        support: `[columns]` ascending ids of the tokens that the columns are for; None: column i is
            token i.
        vocab_size: of the pair, needed with `support`.
        adjusted: `[rows, columns]` after biases and penalties, from which tokens are drawn; None:
            `values`.
    """

    def __init__(
        self,
        values: Tensor,
        hidden: Tensor | None = None,
        support: Tensor | None = None,
        vocab_size: int = 0,
        adjusted: Tensor | None = None,
    ):
        # in a narrower dtype sums and ratios of probabilities would be rounded to it
        self.values = values.float()
        self.adjusted = self.values if adjusted is None else adjusted
        self.hidden, self.support, self.vocab_size = hidden, support, vocab_size
        self.waits = self.values.device.type != "cpu"
        """Reading a number waits for a device."""
        self.laws: dict[tuple[float, ...], Tensor] = {}
        """By row and `Sampling.warpers` the warped probabilities `[columns]` that were asked for
        (`laws_of`)."""
        self.races: dict[Any, list[tuple[int, float]]] = {}
        """By row, warpers, race and number of tokens what `Span.leading_columns` found."""
        self._ranked: dict[int, list[list[tuple[int, float]]]] = {}

    def split(self, counts: Sequence[int]) -> list[Span]:
        """Consecutive spans of so many rows."""
        return [
            Span(self, range(end - count, end))
            for count, end in zip(counts, accumulate(counts), strict=True)
        ]

    @cached_property
    def columns(self) -> NDArray[np.int64] | None:
        """`support` where NumPy computes."""
        return None if self.support is None else self.support.cpu().numpy()

    @cached_property
    def top(self) -> list[int]:
        """The likeliest token of each row, the first of equal ones; −1 where a row has a NaN or +∞,
        or nothing else than −∞."""
        columns = likeliest(self.adjusted)
        if self.support is not None:
            columns = torch.where(columns < 0, columns, self.support[columns])
        found: list[int] = columns.tolist()  # one transfer, where a device computes
        return found

    @cached_property
    def raw(self) -> Tensor:
        """Raw probabilities `[rows, columns]` (temperature 1)."""
        return self.values.softmax(-1)

    @cached_property
    def confidence(self) -> list[float]:
        """C of each row: its largest raw probability."""
        found: list[float] = self.raw.amax(-1).tolist()
        return found

    @cached_property
    def entropy(self) -> list[float]:
        """Entropy of the raw distribution of each row, in nats."""
        found: list[float] = sum_rows(torch.special.entr(self.raw)).tolist()
        return found

    def ranked(self, count: int) -> list[list[tuple[int, float]]]:
        """Of each row up to `count` tokens of the largest raw probability, largest first, each with
        it."""
        if count not in self._ranked:
            best = self.raw.topk(min(count, self.raw.shape[1]))
            tokens = best.indices if self.support is None else self.support[best.indices]
            self._ranked[count] = [
                list(zip(*row, strict=True))
                for row in zip(tokens.tolist(), best.values.tolist(), strict=True)
            ]
        return self._ranked[count]

    def column(self, token: int) -> int | None:
        """Where a token's logits are, None where it has none."""
        if self.support is None:
            return token
        column = int(torch.searchsorted(self.support, token))
        return column if column < len(self.support) and int(self.support[column]) == token else None


class Span:
    """Some rows of a forward pass, as a request's sampling parameters have them.

    Their *warped* distributions are for sampling and judging, the *raw* ones (temperature 1, bans
    applied) for all the rest (docs/methods.md, "Two pairs of distributions"). A look at a token
    or a probability raises `NotFinite` if a logit of any of these rows is NaN or +∞, or all of one
    are −∞; on a device what `draw` and `chances` ask for does so for its own row.

    Args:
        whole: the pass.
        places: numbers of the rows in it.
        indices: of a coupled request: place → number, in the output, of the token after the row.
    """

    __slots__ = ("_chances", "indices", "places", "sampling", "whole")

    def __init__(
        self,
        whole: Logits,
        places: Sequence[int],
        sampling: Sampling = GREEDY,
        indices: Mapping[int, int] | None = None,
    ):
        self.whole, self.places, self.sampling = whole, places, sampling
        self.indices = indices or {}
        self._chances: dict[tuple[int, int], float] = {}

    @classmethod
    def of(cls, whole: Logits, sampling: Sampling = GREEDY) -> Span:
        """All rows of a pass."""
        return cls(whole, range(len(whole.values)), sampling)

    @classmethod
    def joined(cls, spans: Sequence[Span], *, hidden: bool = True) -> Span:
        """Rows of passes of one model, one after another, as it gave them: copies, which hold
        nothing else of these passes.

        Args:
            hidden: with their states.
        """
        first = spans[0].whole
        states = [span.states for span in spans if hidden and span.states is not None]
        values = torch.cat([span.values for span in spans])
        joined = torch.cat(states) if states else None
        return cls.of(Logits(values, joined, first.support, first.vocab_size))

    def under(self, sampling: Sampling, changes: Penalties | None = None) -> Span:
        """The same rows under a request's sampling parameters.

        Args:
            changes: what the tokens before the one that the last row predicts change; the row
                before it counts one token fewer, and so on.
        """
        if not (sampling.banned_token_ids or sampling.biases or sampling.penalises):
            return Span(self.whole, self.places, sampling)
        # these name tokens, of which some may have no column
        values = self.logits
        if sampling.banned_token_ids:
            values = values.clone()
            values[:, list(sampling.banned_token_ids)] = -math.inf
        if changes is not None:
            values = changes.rule_out(values)
        altered = adjusted(values, sampling, changes)
        return Span.of(Logits(values, self.states, adjusted=altered), sampling)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, part: int | slice) -> Span:
        """One row, or several."""
        if isinstance(part, slice):
            return Span(self.whole, self.places[part], self.sampling, self.indices)
        place = self.places[part]
        return Span(self.whole, range(place, place + 1), self.sampling, self.indices)

    def at(self, rows: Sequence[int]) -> Span:
        """Some of these rows, by number."""
        return Span(self.whole, [self.places[row] for row in rows], self.sampling, self.indices)

    def before(self, indices: Iterable[int]) -> Span:
        """The same rows, before these tokens of the output."""
        known = dict(zip(self.places, indices, strict=True))
        return Span(self.whole, self.places, self.sampling, known)

    @property
    def values(self) -> Tensor:
        """`[rows, columns]` float32 as the model gives them, bans applied."""
        return self._rows_of(self.whole.values)

    @property
    def states(self) -> Tensor | None:
        """`[rows, hidden]`, or None where the model has none."""
        return None if self.whole.hidden is None else self._rows_of(self.whole.hidden)

    def _rows_of(self, tensor: Tensor) -> Tensor:
        places = self.places
        return (
            tensor[places.start : places.stop] if isinstance(places, range) else tensor[[*places]]
        )

    @property
    def top(self) -> list[int]:
        """The likeliest token of each row, after penalties and biases; not the argmax of the raw
        row."""
        found = self.whole.top
        top = [found[place] for place in self.places]
        if -1 in top:
            raise NotFinite(NOT_FINITE)
        return top

    @property
    def logits(self) -> Tensor:
        """`[rows, vocab]` float32: raw logits of all tokens, bans applied."""
        return spread(self.values, self.whole.support, self.whole.vocab_size, -math.inf)

    def probs(self, row: int) -> Tensor:
        """Warped probabilities `[vocab]` float32 of a row."""
        return self._spread(self._warp(row))

    def prob(self, row: int, token: int) -> float:
        """Warped probability of a token."""
        column = self.whole.column(token)
        return 0.0 if column is None else float(self._warp(row)[column])

    def raw(self, row: int) -> Tensor:
        """Raw probabilities `[vocab]` float32 of a row."""
        return self._spread(self._raw(row))

    def raw_prob(self, row: int, token: int) -> float:
        """Raw probability of a token."""
        column = self.whole.column(token)
        return 0.0 if column is None else float(self._raw(row)[column])

    def raw_logit(self, row: int, token: int) -> float:
        """Raw logit of a token."""
        _ = self.top
        column = self.whole.column(token)
        return -math.inf if column is None else float(self.whole.values[self.places[row], column])

    def confidence(self, row: int) -> float:
        """C: the largest raw probability of a row."""
        _ = self.top
        return self.whole.confidence[self.places[row]]

    def entropy(self, row: int) -> float:
        """Entropy of the raw distribution of a row, in nats."""
        _ = self.top
        return self.whole.entropy[self.places[row]]

    def hidden(self, row: int) -> Tensor:
        """Last hidden state `[hidden]` of a row."""
        if self.whole.hidden is None:
            raise DraftwellError(
                "this model returns no hidden states, which the strategy needs",
                code="no_hidden_states",
            )
        _ = self.top
        return self.whole.hidden[self.places[row]]

    def likeliest(self, row: int, count: int) -> list[tuple[int, float]]:
        """Up to `count` tokens of the largest raw probability, largest first, each with it."""
        _ = self.top
        return self.whole.ranked(count)[self.places[row]]

    def contenders(self, row: int, count: int) -> list[tuple[int, float]]:
        """Up to `count` tokens that may be the target's choice, the likeliest first, each with a
        number that grows with the chance: `likeliest`, or of a coupled request its race's leaders
        with their shares, for the target runs the same race."""
        if not self.sampling.coupled:
            return self.likeliest(row, count)
        tokens, found = self.whole.columns, self.leading_columns(row, count)
        return [(column if tokens is None else int(tokens[column]), s) for column, s in found]

    def leading_columns(
        self, row: int, count: int = 1, law: NDArray[np.float32] | None = None
    ) -> list[tuple[int, float]]:
        """Columns of the first tokens of a coupled request's race at a row, with their shares:
        computed once, for a stop policy and a draw ask alike.

        Args:
            law: the row's warped probabilities `[columns]`, where they are at hand.
        """
        place = self.places[row]
        race, known = Race(self.sampling.seed, self.indices[place]), self.whole.races
        key = place, self.sampling.warpers, race, count
        if key not in known:
            law = laws_of([self[row]])[0].cpu().numpy() if law is None else law
            known[key] = leaders(law, race, count, self.whole.columns)
        return known[key]

    def token_figures(self, row: int, token: int) -> TokenFigures:
        """Raw probability and rank of a token, and C and entropy of its row.

        C = max q̄ and H = −Σ q̄·ln q̄, over the columns that there are: few operations, since right
        after a forward pass each costs more to begin with than to compute. The likeliest token,
        which greedy drafts consist of, is not looked for.
        """
        whole = self.whole
        likeliest = token == self.top[row] and whole.adjusted is whole.values
        logs = whole.values[self.places[row]].log_softmax(-1)
        weights = logs.exp()
        confidence, moment = float(weights.max()), float(sum_rows(weights * logs))
        if math.isnan(moment):  # a token that is ruled out weighs nothing: 0 · −∞ shall be 0
            moment = float(sum_rows(weights * logs.clamp(min=-1e4)))
        entropy = max(0.0, -moment)
        if likeliest:
            return TokenFigures(raw_prob=confidence, confidence=confidence, entropy=entropy, rank=0)
        raw_prob = self.raw_prob(row, token)
        rank = int((self._raw(row) > raw_prob).sum())
        return TokenFigures(raw_prob=raw_prob, confidence=confidence, entropy=entropy, rank=rank)

    def rating(self, row: int, token: int, count: int) -> Rating:
        """Log-prob of a token at a row, and the `count` likeliest tokens of that row."""
        _ = self.top
        own = self.whole.values[self.places[row]].log_softmax(-1)
        logprobs = spread(own, self.whole.support, self.whole.vocab_size, -math.inf)
        best = logprobs.topk(min(count, len(logprobs)))
        alongside = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return Rating(float(logprobs[token]), tuple(alongside))

    def draw(
        self, row: int, stream: RandomStream, minus: Span | None = None, without: Sequence[int] = ()
    ) -> Step[Drawn]:
        """Draw from the warped distribution of a row, or of what is left of it (`Draw`); a greedy
        request consumes no randomness, and takes the likeliest token whatever is left. A coupled
        one draws from the whole of it by the position's race."""
        if self.sampling.greedy:
            return Drawn(self.top[row], 1.0)
        if not self.whole.waits:  # a device says of this row alone that it is not usable
            _ = self.top
        drawn: Drawn
        if self.sampling.coupled and minus is None and not without:
            drawn = yield Choice(self[row])
        else:
            drawn = yield Draw(self[row], stream, minus, without)
        return drawn

    def fetch_chances(self, rows: Sequence[int], tokens: Sequence[int]) -> Step[None]:
        """On a device, get what `chances` will be asked for, a token for each row: one wait instead
        of one a token. CPUs compute them one by one, as far as they are asked."""
        if not self.whole.waits:
            _ = self.top  # one that is not usable is found behind a rejection, too
        elif tokens and not self.sampling.has_choice:
            found: list[float] = yield Probs(self.at(rows), tokens)
            self._chances = dict(zip(zip(rows, tokens, strict=True), found, strict=True))

    def chances(self, row: int, tokens: Sequence[int]) -> Step[list[float]]:
        """Warped probabilities of tokens at a row, of a request that is not greedy."""
        pairs = [(row, token) for token in tokens]
        if all(pair in self._chances for pair in pairs):
            return [self._chances[pair] for pair in pairs]
        found: list[float] = yield Probs(self.at([row] * len(tokens)), tokens)
        return found

    def chance(self, row: int, token: int) -> Step[float]:
        """As `chances`, of one token."""
        return (yield from self.chances(row, [token]))[0]

    def _warp(self, row: int) -> Tensor:
        """Warped probabilities `[columns]` of a row."""
        _ = self.top
        return laws_of([self[row]])[0]

    def _raw(self, row: int) -> Tensor:
        """Raw probabilities `[columns]` of a row."""
        _ = self.top
        return self.whole.raw[self.places[row]]

    def _spread(self, columns: Tensor) -> Tensor:
        return spread(columns, self.whole.support, self.whole.vocab_size)


def spread(columns: Tensor, support: Tensor | None, vocab_size: int, rest: float = 0.0) -> Tensor:
    """Values of some tokens `[..., columns]` → of all `[..., vocab]`.

    Args:
        support: `[columns]` ids of the tokens; None: they are all there, and `columns` is returned
            as it is.
        rest: value of the tokens that have no column.
    """
    if support is None:
        return columns
    return columns.new_full((*columns.shape[:-1], vocab_size), rest).index_copy_(
        -1, support, columns
    )


def laws_of(rows: Sequence[Span]) -> Tensor:
    """Warped probabilities `[n, columns]` of single rows of one model, which share their columns.

    Each is computed once, and those of equal sampling parameters together. Not to be changed in
    place.
    """
    keys = [(row.places[0], *row.sampling.warpers) for row in rows]
    missing: dict[tuple[float, ...], dict[tuple[int, int], Span]] = {}
    for row, key in zip(rows, keys, strict=True):
        if key not in row.whole.laws:
            alike = missing.setdefault(row.sampling.warpers, {})
            alike[id(row.whole), row.places[0]] = row
    for warpers, alike in missing.items():
        some = list(alike.values())
        laws = warp(stacked(some), some[0].sampling)
        for row, law in zip(some, laws, strict=True):
            row.whole.laws[row.places[0], *warpers] = law
        if len(some) == len(rows):
            return laws
    if len(rows) == 1:
        return rows[0].whole.laws[keys[0]][None]
    return torch.stack([row.whole.laws[key] for row, key in zip(rows, keys, strict=True)])


def stacked(rows: Sequence[Span]) -> Tensor:
    """Adjusted logits `[n, columns]` of single rows; no copy where they follow one another in a
    pass."""
    whole, first = rows[0].whole, rows[0].places[0]
    if all(row.whole is whole and row.places[0] == place for place, row in enumerate(rows, first)):
        return whole.adjusted[first : first + len(rows)]
    return torch.stack([row.whole.adjusted[row.places[0]] for row in rows])
