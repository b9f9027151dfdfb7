"""What papers predict from acceptance rates and costs: plain arithmetic, no models.

Acceptance is taken as independent from token to token, as the papers take it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from serving.artifacts.forward_costs import seconds_at

MOST_GAMMAS = 32
"""Longest draft that `best_gamma` looks at."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of one round of speculative decoding (Leviathan 2023, Eq. 1).

    Args:
        alpha: chance that a draft token is accepted, in [0, 1].
        gamma: draft tokens of a round.

    >>> expected_tokens(0.5, 1), expected_tokens(1.0, 4)
    (1.5, 5.0)
    """
    return gamma + 1.0 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def token_acceptance(accepted: float, gamma: int) -> float:
    """The chance per token at which rounds of γ drafts accept so many tokens on average: α with α(1 − α^γ)/(1 − α) = `accepted`.

    Args:
        accepted: tokens of a round that are kept, in [0, γ]; SPIDE's MAT of vanilla SD, of which each round samples one token.
        gamma: draft tokens of a round.
    Raises:
        ValueError: a round cannot accept so many.

    >>> round(token_acceptance(1.5, 2), 3), token_acceptance(4.0, 4), token_acceptance(0.0, 4)
    (0.823, 1.0, 0.0)
    """
    if not 0 <= accepted <= gamma:
        raise ValueError(f"a round of {gamma} drafts cannot accept {accepted} tokens")
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        kept = sum(middle ** i for i in range(1, gamma + 1))  # the closed form loses its digits near 1
        low, high = (middle, high) if kept < accepted else (low, middle)
    return round((low + high) / 2, 9)


def leviathan_speedup(alpha: float, gamma: int, c: float) -> float:
    """Expected speed-up over plain decoding (Leviathan 2023, Theorem 3.8).

    Args:
        c: seconds of a draft pass over those of a target pass, which is assumed to take as long for γ + 1 tokens as for one.

    >>> round(leviathan_speedup(0.8, 5, 0.05), 2)
    2.95
    """
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def sd_speedup(alpha: float, gamma: int, plain: float, draft: float, verify: Mapping[int, float], rest: float = 0.0) -> float:
    """The same with what passes were measured to take.

    Args:
        plain: seconds of a target pass over one token in plain decoding.
        draft: seconds of a draft pass.
        verify: tokens → seconds of a target pass.
        rest: seconds of a round outside passes.

    >>> sd_speedup(1.0, 1, 1.0, 0.5, {1: 1.0, 2: 1.5})
    1.0
    """
    return expected_tokens(alpha, gamma) * (plain + rest) / (gamma * draft + seconds_at(verify, gamma + 1) + rest)


def best_gamma(alpha: float, draft: float, verify: Mapping[int, float], rest: float = 0.0) -> int:
    """The draft length with the largest `sd_speedup`."""
    return max(range(1, MOST_GAMMAS + 1), key=lambda gamma: sd_speedup(alpha, gamma, 1.0, draft, verify, rest))


def serial_length(alpha: float, tau: float, cap: int = 32) -> int:
    """Tokens that SPIDE drafts before it verifies, where every token has the same estimated chance: the first k with αᵏ ≤ τ.

    >>> serial_length(0.8, 0.7), serial_length(0.9, 0.7), serial_length(1.0, 0.7)
    (2, 4, 32)
    """
    if alpha <= 0:
        return 1
    if alpha >= 1 or tau <= 0:
        return cap
    return min(cap, max(1, math.ceil(math.log(tau) / math.log(alpha) - 1e-9)))


def spide_pace(alpha: float, tau: float, alone: tuple[float, Mapping[int, float]], busy: tuple[float, Mapping[int, float]],
               rest: float = 0.0, cap: int = 32) -> float:
    """Tokens per second of SPIDE's Algorithm 1 where every token has the same chance α: what it gains by overlapping alone.

    A cycle begins serially with k drafts. The target then judges these and the continuation's first token while s more are drafted; as long
    as all are kept it judges s more each time (s − 1 that are left over and the next first token); a rejection ends the cycle.

    Args:
        tau: SPIDE's threshold.
        alone: (seconds of a draft pass, tokens → seconds of a target pass) with the other model idle.
        busy: the same with both at once.
        rest: seconds of a target call outside passes.
    """
    k, (draft, verify) = serial_length(alpha, tau, cap), busy
    seconds, tokens, chance, judged = k * alone[0], 0.0, 1.0, k + 1
    while chance > 1e-9:
        steps = min(cap, max(1, math.floor(seconds_at(verify, judged) / draft)))
        kept = alpha ** judged
        seconds += chance * (max(seconds_at(verify, judged), steps * draft) + rest)
        tokens += chance * (expected_tokens(alpha, judged) - kept)  # accepted ones, and the correction if any was rejected
        chance *= kept if alpha < 1 else 0.0  # α = 1 would never end: one window stands for all
        judged = steps
    return tokens / seconds


def sd_pace(alpha: float, gamma: int, alone: tuple[float, Mapping[int, float]], rest: float = 0.0) -> float:
    """Tokens per second of speculative decoding on the same cores."""
    draft, verify = alone
    return expected_tokens(alpha, gamma) / (gamma * draft + seconds_at(verify, gamma + 1) + rest)


def expected_run(true_positive: float, false_positive: float, acceptable: int) -> float:
    """Draft tokens that SPRINTER's verifier accepts before its first rejection (Theorem 3.3).

    Args:
        true_positive, false_positive: chances that it accepts an acceptable and an unacceptable token, below 1.
        acceptable: r: so many tokens are acceptable, all further ones are not.
    """
    return _before(true_positive, acceptable) - 1 + true_positive ** acceptable / (1 - false_positive)


def expected_stop(true_positive: float, false_positive: float, acceptable: int, draft_seconds: float) -> float:
    """Seconds until that rejection, where the verifier takes none (Theorem 3.4); arguments as in `expected_run`."""
    return draft_seconds * (_before(true_positive, acceptable) + true_positive ** acceptable / (1 - false_positive))


def _before(true_positive: float, acceptable: int) -> float:
    """1 + η + … + η^(r − 1)."""
    return float(sum(true_positive ** i for i in range(acceptable)))


def sprinter_acceptance(false_positive: float, total_variation: float) -> float:
    """Chance that a draft token stays in SPRINTER's text (Theorem A.4).

    >>> sprinter_acceptance(0.0, 0.25), sprinter_acceptance(1.0, 0.25)
    (0.75, 1.0)
    """
    return 1 - (1 - false_positive) * total_variation


def sd_flops(gamma: int, draft: float, target: float) -> float:
    """FLOPs of one run of speculative decoding (SPRINTER, Eq. 5); `draft`, `target`: FLOPs of a pass over one token."""
    return gamma * (draft + target)


def sprinter_flops(gamma: int, draft: float, target: float, verifier: float = 0.0) -> float:
    """FLOPs of one run of SPRINTER with a perfect verifier (Eq. 6): the target is charged one token, however many it has to read."""
    return gamma * (draft + verifier) + target


def forward_flops(layers: int, hidden: int, heads: int, vocab: int, context: int) -> float:
    """FLOPs of a pass over one token of a GPT-2-like model (Hoffmann 2022, Appendix F; SPRINTER, A.8).

    Embeddings count as a product with the vocabulary, the feed-forward network is four times as wide as the states, and every token attends
    over a full context.

    Args:
        context: positions that a token attends over.

    >>> round(20 * forward_flops(12, 768, 12, 50257, 1024) / 1e9, 2)  # GPT-2 Small, 20 tokens: 7.25 billion in the paper
    7.25
    """
    embeddings_and_logits = 2 * 2 * vocab * hidden
    products = 24 * hidden ** 2  # queries, keys and values 6, output 2, feed-forward 16
    attention = 4 * context * hidden + 3 * heads * context
    return float(embeddings_and_logits + layers * (products + attention))
