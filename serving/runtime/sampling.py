"""Distributions and random streams.

Two pairs of distributions, never mixed (docs/methods.md): the *warped* one (penalties, biases,
temperature, top-k, top-p, bans) is for sampling, acceptance and residuals; the *raw* one (softmax
at temperature 1, bans applied) is for confidence, entropy, thresholds, divergences and learned
features. What a grammar rules out at a position counts as banned there. At temperature 0 a warped
row is one-hot, so everything dynamic must read the raw row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from draftwell.serving.artifacts.verifier import TokenFigures
from draftwell.serving.errors import DraftwellError, NotFinite
from draftwell.serving.runtime import types
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.requests import Sampling

LEAST_TEMPERATURE = 1e-30
"""What smaller ones are taken for: float32 has no reciprocal of them, and 0/0 is no
distribution."""
NUCLEUS = 1024
"""Tokens that are put in order before all are, where top-p is asked for."""


def sum_rows(rows: Tensor) -> Tensor:
    """Sums `[...]` over the last dimension of `[..., vocab]` float32, contiguous and without
    gradients, each in one order: PyTorch cuts a row into as many pieces as there are threads, and a
    request with a seed would have other answers when their number changes."""
    if rows.device.type != "cpu":
        return rows.sum(-1)
    return torch.from_numpy(np.asarray(rows.detach().numpy().sum(-1)))


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Warped probabilities of one position, or of several.

    Args:
        logits: `[vocab]` or `[rows, vocab]` float32, bans already applied.
    Returns:
        the same shape, float32 that sums to 1; one-hot at temperature 0. Order as in transformers:
        temperature, top-k, top-p, min-p.
    """
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # the largest at 0: nothing overflows
    scaled = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, LEAST_TEMPERATURE)
    if 0 < sampling.top_k < scaled.shape[-1]:
        kth = scaled.topk(sampling.top_k).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -math.inf)
    if sampling.top_p < 1.0:
        scaled = nucleus(scaled, sampling.top_p)
    if sampling.min_p > 0.0:  # the likeliest token is at 0
        scaled = scaled.masked_fill(scaled < math.log(sampling.min_p), -math.inf)
    return scaled.softmax(-1)


def nucleus(logits: Tensor, top_p: float, first: int = NUCLEUS) -> Tensor:
    """Logits with −∞ outside the smallest set of likeliest tokens whose mass reaches `top_p`; of
    equal ones the first tokens are in it.

    Sorting a vocabulary takes longer than anything else in sampling, and a few hundred tokens
    nearly always hold the mass. So only the `first` largest are put in order on a CPU, and all only
    where these do not hold it: the result is the same.

    Args:
        logits: `[..., vocab]` float32.
        top_p: in (0, 1).
    """
    most = logits.amax(-1, keepdim=True)
    whole = most + sum_rows((logits - most).exp())[..., None].log()
    # elsewhere a look at a result would wait for the device, which sorts fast
    on_cpu = logits.device.type == "cpu"
    for partial in (True, False) if on_cpu and first < logits.shape[-1] else (False,):
        largest = logits.topk(first).values if partial else logits.sort(descending=True).values
        mass = (largest - whole).exp().cumsum(-1)
        # a token is in the set while those before it do not have the mass
        count = 1 + (mass[..., :-1] < top_p).sum(-1, keepdim=True)
        if not partial or bool((count < first).all()):
            break
    least = largest.gather(-1, count - 1)
    dropped = logits < least
    surplus = logits.shape[-1] - dropped.sum(-1, keepdim=True) - count
    if not on_cpu or bool((surplus > 0).any()):  # several tokens equal the last one
        equal = logits == least
        dropped |= equal & (equal.cumsum(-1) > equal.sum(-1, keepdim=True) - surplus)
    return logits.masked_fill(dropped, -math.inf)


def adjusted(logits: Tensor, sampling: Sampling, written: Sequence[int] | Penalties) -> Tensor:
    """Logits after biases and penalties: each row counts the output and draft tokens before the
    token that it predicts.

    Args:
        logits: `[rows, vocab]` float32 of consecutive positions, bans already applied; returned as
            they are where a request asks for neither.
        written: output and draft tokens before the token of the last row, or the request's
            `Penalties`, which follow them; row i of n counts all but the last n − 1 − i.
    Returns:
        `[rows, vocab]`: z(t) + bias(t), with what `Penalties` make of it.
    """
    if sampling.biases:
        logits = logits.clone()
        tokens, biases = tensors_of(sampling.biases, logits.device, logits.dtype)
        logits[:, tokens] += biases
    if not sampling.penalises:
        return logits
    penalties = written if isinstance(written, Penalties) else Penalties(sampling).follow(written)
    return penalties.apply(logits)


@lru_cache(64)
def tensors_of(
    pairs: tuple[tuple[int, float], ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tokens and numbers as tensors: a request needs the same ones for every draft step and every
    verification."""
    tokens, numbers = zip(*pairs, strict=True)
    return torch.tensor(tokens, device=device), torch.tensor(numbers, device=device, dtype=dtype)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(0, p − q)) over `[vocab]`; p itself when rounding leaves no mass (Leviathan 2023,
    section 2.3)."""
    left = (target_probs - draft_probs).clamp(min=0.0)
    total = sum_rows(left)
    return torch.where(total > 0.0, left / total, target_probs)


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


def rate(rows: types.Rows, row: int, token: int, count: int) -> types.Rating:
    """Log-prob of a token at a row, and the `count` likeliest tokens of that row."""
    logprobs = rows.raw_logprobs(row)
    best = logprobs.topk(min(count, len(logprobs)))
    return types.Rating(
        float(logprobs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    )


class LikeliestTokens:
    """The likeliest token of every row of a forward pass: one search and one transfer for all
    requests that it ran for.

    Args:
        logits: `[rows, columns]` of all requests.
        support: `[columns]` ids of the columns' tokens; None: column i is token i.
    """

    def __init__(self, logits: Tensor, support: Tensor | None = None):
        self._logits, self._support = logits, support
        self._found: list[int] | None = None

    def of(self, start: int, end: int) -> list[int]:
        """Tokens of the rows from `start` up to `end`; −1 where a row has a NaN or +∞, or nothing
        else than −∞."""
        if self._found is None:
            self._found = likeliest(self._logits, self._support)
        return self._found[start:end]


def likeliest(logits: Tensor, support: Tensor | None = None) -> list[int]:
    """The likeliest token of each row `[rows, columns]`, the first of equal ones; −1 for a row that
    is not usable."""
    largest, index = largest_with_place(logits)
    if support is not None:
        index = support[index]
    # one transfer, where a device computes
    found: list[int] = index.masked_fill(~largest.isfinite(), -1).tolist()
    return found


def largest_with_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`logits.max(-1)` of `[rows, columns]`: the first place of equal ones, and NaN where there is
    one.

    On CPUs PyTorch takes ten times as long for it as NumPy (44 and 4 µs for 49,152 columns).
    """
    if logits.device.type != "cpu":
        return logits.max(-1)
    place = torch.from_numpy(logits.detach().numpy().argmax(-1))
    return logits.gather(-1, place[:, None])[:, 0], place


class LogitRows:
    """Logits of consecutive positions of one model, with both kinds of distribution computed when
    asked for.

    Args:
        logits: `[rows, vocab]` float32; `[rows, columns]` with `support`.
        sampling: the request's sampling parameters.
        hidden: `[rows, hidden]`, last hidden states of the same positions.
        written: output and draft tokens before the token of the last row, or the request's
            `Penalties`; only penalties look at it.
        support: `[columns]` ascending ids of the tokens that have a logit, all others being −∞;
            only for requests without bans, biases and penalties. What is computed is computed over
            these columns, what is returned is over the vocabulary.
        vocab_size: needed with `support`.
        top: gives the likeliest token of each row, where others' rows were searched with them; not
            where a request alters its logits.
    Raises:
        NotFinite: at the first look at any row, if a logit of any of them is NaN or +∞, or all of
            one are −∞.
    """

    def __init__(
        self,
        logits: Tensor,
        sampling: Sampling,
        hidden: Tensor | None = None,
        written: Sequence[int] | Penalties = (),
        *,
        support: Tensor | None = None,
        vocab_size: int = 0,
        top: Callable[[], list[int]] | None = None,
    ):
        if sampling.banned_token_ids:
            logits = logits.clone()
            logits[:, list(sampling.banned_token_ids)] = -math.inf
        if isinstance(written, Penalties):
            logits = written.rule_out(logits)
        self._logits = logits
        self._adjusted = adjusted(logits, sampling, written)
        self.sampling = sampling
        self._hidden = hidden
        self._support, self._vocab_size = support, vocab_size
        self._find_top = top
        self._top: list[int] | None = None
        self._warped: dict[int, Tensor] = {}
        self._probs: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._raw: dict[int, Tensor] = {}
        self._confidence: dict[int, float] = {}

    def __len__(self) -> int:
        return int(self._logits.shape[0])

    @property
    def logits(self) -> Tensor:
        """Raw logits `[rows, vocab]` with bans, seen to be usable."""
        _ = self.top
        return spread(self._logits, self._support, self._vocab_size, -math.inf)

    @property
    def top(self) -> list[int]:
        """The most likely token of each row, after penalties and biases."""
        if self._top is None:
            top = self._find_top() if self._find_top else likeliest(self._adjusted, self._support)
            if min(top, default=0) < 0:
                raise NotFinite(
                    "a model returned NaN or infinite logits: check its weights and dtype"
                )
            self._top = top
        return self._top

    def probs(self, row: int) -> Tensor:
        """Warped probabilities `[vocab]` of a row."""
        if row not in self._probs:
            self._probs[row] = spread(self._warp(row), self._support, self._vocab_size)
        return self._probs[row]

    def raw(self, row: int) -> Tensor:
        """Raw probabilities `[vocab]` (temperature 1) of a row."""
        if row not in self._raw:
            self._raw[row] = spread(self._softmax(row), self._support, self._vocab_size)
        return self._raw[row]

    def raw_logprobs(self, row: int) -> Tensor:
        """Natural logarithms `[vocab]` of a row's raw probabilities."""
        _ = self.top  # checks for NaN
        return spread(self._logits[row].log_softmax(-1), self._support, self._vocab_size, -math.inf)

    def raw_logit(self, row: int, token: int) -> float:
        """Raw logit of a token."""
        _ = self.top  # checks for NaN
        column = self._column(token)
        return -math.inf if column is None else float(self._logits[row, column])

    def hidden(self, row: int) -> Tensor:
        """Last hidden state `[hidden]` of a row."""
        if self._hidden is None:
            raise DraftwellError(
                "this model returns no hidden states, which the strategy needs",
                code="no_hidden_states",
            )
        _ = self.top  # checks for NaN
        return self._hidden[row]

    def confidence(self, row: int) -> float:
        """C: the largest raw probability of a row."""
        # a draft's stop rule and its drafter both ask, and each read would wait for the result
        if row not in self._confidence:
            self._confidence[row] = float(self._softmax(row).max())
        return self._confidence[row]

    def raw_prob(self, row: int, token: int) -> float:
        """Raw probability of a token."""
        column = self._column(token)
        return 0.0 if column is None else float(self._softmax(row)[column])

    def likeliest(self, row: int, count: int) -> list[tuple[int, float]]:
        """Up to `count` tokens of the largest raw probability, largest first, each with it."""
        weights = self._softmax(row)
        best = weights.topk(min(count, len(weights)))
        tokens = best.indices if self._support is None else self._support[best.indices]
        return list(zip(tokens.tolist(), best.values.tolist(), strict=True))

    def entropy(self, row: int) -> float:
        """Entropy of the raw distribution of a row, in nats."""
        return float(sum_rows(torch.special.entr(self._softmax(row))))

    def token_figures(self, row: int, token: int) -> TokenFigures:
        """Raw probability and rank of a token, and C and entropy of its row.

        C = max q̄ and H = −Σ q̄·ln q̄, over the columns that there are: few operations, since right
        after a forward pass each costs more to begin with than to compute. The likeliest token,
        which greedy drafts consist of, is not looked for.
        """
        likeliest = token == self.top[row] and self._adjusted is self._logits  # also checks for NaN
        logs = self._logits[row].log_softmax(-1)
        weights = logs.exp()
        confidence, moment = float(weights.max()), float(sum_rows(weights * logs))
        if math.isnan(moment):  # a token that is ruled out weighs nothing: 0 · −∞ shall be 0
            moment = float(sum_rows(weights * logs.clamp(min=-1e4)))
        entropy = max(0.0, -moment)
        if likeliest:
            return TokenFigures(raw_prob=confidence, confidence=confidence, entropy=entropy, rank=0)
        raw_prob = self.raw_prob(row, token)
        rank = int((self._softmax(row) > raw_prob).sum())
        return TokenFigures(raw_prob=raw_prob, confidence=confidence, entropy=entropy, rank=rank)

    def sample(self, row: int, stream: types.Stream) -> int:
        """Draw from the warped distribution of a row; greedy requests consume no uniform."""
        if self.sampling.greedy:
            return self.top[row]
        column = stream.draw(self._warp(row))
        return column if self._support is None else int(self._support[column])

    def _warp(self, row: int) -> Tensor:
        """Warped probabilities `[columns]` of a row."""
        if row not in self._warped:
            _ = self.top  # checks for NaN
            self._warped[row] = warp(self._adjusted[row], self.sampling)
        return self._warped[row]

    def _softmax(self, row: int) -> Tensor:
        """Raw probabilities `[columns]` of a row."""
        if row not in self._weights:
            _ = self.top  # checks for NaN
            self._weights[row] = self._logits[row].softmax(-1)
        return self._weights[row]

    def _column(self, token: int) -> int | None:
        """Where a token's logit is, None where it has none."""
        if self._support is None:
            return token
        column = int(torch.searchsorted(self._support, token))
        return (
            column if column < len(self._support) and int(self._support[column]) == token else None
        )
