"""Distributions: what temperature, truncation, biases and penalties make of logits.

Two pairs of distributions, never mixed (docs/methods.md): the *warped* one (penalties, biases,
temperature, top-k, top-p, bans) is for sampling, acceptance and residuals; the *raw* one (softmax
at temperature 1, bans applied) is for confidence, entropy, thresholds, divergences and learned
features. What a grammar rules out at a position counts as banned there. At temperature 0 a warped
row is one-hot, so everything dynamic must read the raw row.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

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


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(0, p − q)) over `[vocab]`; p itself when rounding leaves no mass (Leviathan 2023,
    section 2.3)."""
    left = (target_probs - draft_probs).clamp(min=0.0)
    total = sum_rows(left)
    return torch.where(total > 0.0, left / total, target_probs)


def largest_with_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`logits.max(-1)` of `[rows, columns]`: the first place of equal ones, and NaN where there is
    one.

    On CPUs PyTorch takes ten times as long for it as NumPy (44 and 4 µs for 49,152 columns).
    """
    if logits.device.type != "cpu":
        return logits.max(-1)
    place = torch.from_numpy(logits.detach().numpy().argmax(-1))
    return logits.gather(-1, place[:, None])[:, 0], place
