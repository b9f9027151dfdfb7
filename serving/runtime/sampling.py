"""Distributions: what temperature, truncation, biases and penalties make of logits.

Two pairs of distributions, never mixed (docs/methods.md): the *warped* one (penalties, biases,
temperature, top-k, top-p, bans) is for sampling, acceptance and residuals; the *raw* one (softmax
at temperature 1, bans applied) is for confidence, entropy, thresholds, divergences and learned
features. What a grammar rules out at a position counts as banned there. At temperature 0 a warped
row is one-hot, so everything dynamic must read the raw row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.requests import Sampling

LEAST_TEMPERATURE = 1e-30
"""What smaller ones are taken for: float32 has no reciprocal of them, and 0/0 is no
distribution."""
BLOCK = 256
"""Columns whose mass is summed before one of them is looked for."""
BELOW_ONE = 1.0 - 2.0**-52
NUCLEUS = (64, 1024)
"""Tokens that are put in order before all are, where top-p is asked for."""


def sum_rows(rows: Tensor) -> Tensor:
    """Sums `[...]` over the last dimension of `[..., vocab]` float32, contiguous and without
    gradients, each in one order: PyTorch cuts a row into as many pieces as there are threads, and a
    request with a seed would have other answers when their number changes."""
    if rows.device.type != "cpu":
        # in an order that the number of rows decides: by float64 it is lost in rounding to float32
        return rows.sum(-1, dtype=torch.float64).to(rows.dtype)
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
    scaled = centred(logits)
    if sampling.temperature != 1.0:
        scaled /= max(sampling.temperature, LEAST_TEMPERATURE)
    if 0 < sampling.top_k < scaled.shape[-1]:
        kth = scaled.topk(sampling.top_k).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -math.inf)
    if sampling.top_p < 1.0:
        scaled = nucleus(scaled, sampling.top_p)
    if sampling.min_p > 0.0:  # the likeliest token is at 0
        scaled = scaled.masked_fill(scaled < math.log(sampling.min_p), -math.inf)
    return normalised(scaled)


def centred(logits: Tensor) -> Tensor:
    """A copy of `[..., vocab]` with the largest of each row at 0, so that nothing overflows.

    Here and in `normalised`, `inverted` and `likeliest` NumPy computes on CPUs: PyTorch shares a
    row out among threads, and takes longer to wake them than the operation does.
    """
    if logits.device.type != "cpu":
        return logits - logits.amax(-1, keepdim=True)
    rows = logits.detach().numpy()
    with np.errstate(invalid="ignore"):  # a row that is not finite becomes NaN
        return torch.from_numpy(rows - rows.max(-1, keepdims=True))


def normalised(scaled: Tensor) -> Tensor:
    """Probabilities in the place of centred logits `[..., vocab]` float32."""
    if scaled.device.type != "cpu":
        return scaled.softmax(-1)
    rows = scaled.numpy()
    np.exp(rows, out=rows)
    rows /= rows.sum(-1, keepdims=True)
    return scaled


def nucleus(logits: Tensor, top_p: float, first: Sequence[int] = NUCLEUS) -> Tensor:
    """Logits with −∞ outside the smallest set of likeliest tokens whose mass reaches `top_p`; of
    equal ones the first tokens are in it.

    Sorting a vocabulary takes longer than anything else in sampling, and some dozen tokens nearly
    always hold the mass. So on a CPU only the `first` largest are put in order, then more of the
    rows where these do not hold it, and at last all: the result is the same.

    Args:
        logits: `[..., vocab]` float32.
        top_p: in (0, 1).
    """
    rows = logits.reshape(-1, logits.shape[-1])
    # elsewhere a look at a result would wait for the device, which sorts fast
    on_cpu = rows.device.type == "cpu"
    size = next((size for size in first if on_cpu and size < rows.shape[1]), None)
    largest, places = rows.topk(size) if size else rows.sort(descending=True, stable=True)
    # a device cuts a running sum by the number of rows: in float64 that shows nowhere
    exact = None if on_cpu else torch.float64
    mass = rows.softmax(-1).gather(-1, places).cumsum(-1, dtype=exact)
    # a token is in the set while those before it do not have the mass
    count = 1 + (mass[:, :-1] < top_p).sum(-1, keepdim=True)
    outside = torch.arange(largest.shape[1], device=rows.device) >= count
    largest_kept = largest.masked_fill(outside, -math.inf)
    kept = torch.full_like(rows, -math.inf).scatter_(-1, places, largest_kept)
    if size:
        # the set may go on behind the last of these, or with one that equals its last
        following = largest.gather(-1, count.clamp(max=size - 1))
        unsure = (count == size) | (following == largest.gather(-1, count - 1))
        if bool(unsure.any()):
            left = unsure[:, 0].nonzero()[:, 0]
            kept[left] = nucleus(rows[left], top_p, [more for more in first if more > size])
    return kept.view_as(logits)


def adjusted(logits: Tensor, sampling: Sampling, changes: Penalties | None) -> Tensor:
    """Logits after biases and penalties: each row counts the output and draft tokens before the
    token that it predicts.

    Args:
        logits: `[rows, vocab]` float32 of consecutive positions, bans already applied; returned as
            they are where a request asks for neither.
        changes: of the request, at the token of the last row; None: nothing is written yet.
    Returns:
        `[rows, vocab]`: z(t) + bias(t), with what `Penalties` make of it.
    """
    if sampling.biases:
        logits = logits.clone()
        tokens, biases = tensors_of(sampling.biases, logits.device, logits.dtype)
        logits[:, tokens] += biases
    if not sampling.penalises:
        return logits
    return (changes or Penalties(sampling)).apply(logits)


@lru_cache(64)
def tensors_of(
    pairs: tuple[tuple[int, float], ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tokens and numbers as tensors: a request needs the same ones for every draft step and every
    verification."""
    tokens, numbers = zip(*pairs, strict=True)
    return torch.tensor(tokens, device=device), torch.tensor(numbers, device=device, dtype=dtype)


def inverted(laws: Tensor, uniforms: Tensor) -> Tensor:
    """The column `[n]` at which the cumulative mass of each row of `laws` `[n, columns]` exceeds
    `uniforms` `[n]` of its whole, in [0, 1); it always has mass of its own.

    First among blocks of columns and then within one: a running sum over a vocabulary takes longer
    than a softmax.
    """
    if laws.device.type == "cpu":
        pairs = zip(laws.detach().numpy(), uniforms.tolist(), strict=True)
        return torch.tensor([inverted_row(law, uniform) for law, uniform in pairs])
    blocks = torch.nn.functional.pad(laws, (0, -laws.shape[1] % BLOCK)).view(len(laws), -1, BLOCK)
    sums = blocks.double().sum(-1).cumsum(-1)
    points = uniforms.double().to(sums.device)[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, points, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    share = (points - before) / (sums.gather(1, block) - before)
    inside = blocks[torch.arange(len(laws), device=laws.device), block[:, 0]].double().cumsum(-1)
    # a share of 1 by rounding would lie behind the last column with mass
    found = torch.searchsorted(inside, share.clamp(max=BELOW_ONE) * inside[:, -1:], right=True)
    return (block * BLOCK + found)[:, 0].clamp(max=laws.shape[1] - 1)


def inverted_row(law: NDArray[np.float32], uniform: float) -> int:
    """As `inverted`, of one row `[columns]`."""
    starts = np.arange(0, len(law), BLOCK)
    sums = np.add.reduceat(law, starts, dtype=np.float64).cumsum()
    point = uniform * sums[-1]
    block = min(int(sums.searchsorted(point, side="right")), len(sums) - 1)
    before = sums[block - 1] if block else 0.0
    inside = law[starts[block] : starts[block] + BLOCK].cumsum(dtype=np.float64)
    share = min((point - before) / (sums[block] - before), BELOW_ONE)
    found = int(inside.searchsorted(share * inside[-1], side="right"))
    return min(int(starts[block]) + found, len(law) - 1)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(0, p − q)) over `[vocab]`; p itself when rounding leaves no mass (Leviathan 2023,
    section 2.3)."""
    left = (target_probs - draft_probs).clamp(min=0.0)
    total = sum_rows(left)
    return torch.where(total > 0.0, left / total, target_probs)


def likeliest(logits: Tensor) -> Tensor:
    """The column of the largest logit of each row, the first of equal ones; −1 where a row has a
    NaN or +∞, or nothing else than −∞.

    On CPUs PyTorch takes ten times as long for it as NumPy (44 and 4 µs for 49,152 columns).
    """
    if logits.device.type != "cpu":
        largest, columns = logits.max(-1)
        return columns.masked_fill(~largest.isfinite(), -1)
    rows = logits.detach().numpy()
    found = rows.argmax(-1)
    found[~np.isfinite(rows[np.arange(len(rows)), found])] = -1
    return torch.from_numpy(found)
