"""What papers predict from acceptance rates and costs: plain arithmetic, no models.

Acceptance is taken as independent from token to token, as the papers take it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from draftwell.serving.artifacts.forward_costs import seconds_at

Passes = tuple[float, Mapping[int, float]]
"""Seconds of a draft pass, and tokens → seconds of a target pass."""
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
    """The chance per token at which rounds of γ drafts accept so many tokens on average: α with α(1
    − α^γ)/(1 − α) = `accepted`.

    Args:
        accepted: tokens of a round that are kept, in [0, γ]; SPIDE's MAT of vanilla SD, of which
            each round samples one token.
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
        # the closed form loses its digits near 1
        kept = sum(middle**i for i in range(1, gamma + 1))
        low, high = (middle, high) if kept < accepted else (low, middle)
    return round((low + high) / 2, 9)


def sd_speedup(
    alpha: float, gamma: int, plain: float, draft: float, verify: Mapping[int, float]
) -> float:
    """Expected speed-up over plain decoding: Leviathan 2023, Theorem 3.8, with a target pass whose
    time depends on its tokens.

    Args:
        plain: seconds of a target pass over one token in plain decoding.
        draft: seconds of a draft pass.
        verify: tokens → seconds of a target pass.

    >>> sd_speedup(1.0, 1, 1.0, 0.5, {1: 1.0, 2: 1.5})
    1.0
    >>> round(sd_speedup(0.8, 5, 1.0, 0.05, {1: 1.0}), 2)
    2.95
    """
    return expected_tokens(alpha, gamma) * plain / (gamma * draft + seconds_at(verify, gamma + 1))


def best_gamma(alpha: float, draft: float, verify: Mapping[int, float]) -> int:
    """The draft length with the largest `sd_speedup`."""
    return max(
        range(1, MOST_GAMMAS + 1),
        key=lambda gamma: sd_speedup(alpha, gamma, 1.0, draft, verify),
    )


def serial_length(alpha: float, tau: float, cap: int = 32) -> int:
    """Tokens that SPIDE drafts before it verifies, where every token has the same estimated chance:
    the first k with αᵏ ≤ τ.

    >>> serial_length(0.8, 0.7), serial_length(0.9, 0.7), serial_length(1.0, 0.7)
    (2, 4, 32)
    """
    if alpha <= 0:
        return 1
    if alpha >= 1 or tau <= 0:
        return cap
    return min(cap, max(1, math.ceil(math.log(tau) / math.log(alpha) - 1e-9)))


def overlapped_seconds(
    tokens: int,
    alpha: float,
    passes: Passes,
    steps: Callable[[int], int],
    *,
    serial: int = 0,
    in_turn: bool = False,
) -> float:
    """Seconds in which a strategy that drafts on while the target verifies, such as SPIDE's
    Algorithm 1, writes a text whose tokens are all kept with chance α.

    A cycle begins with `serial` drafts. The target then judges these and the continuation's first
    token while more are drafted; as long as all are kept it judges those each time (all but one
    are left over, and the next first token); a rejection ends the cycle. No draft goes beyond the
    text: in short answers that keeps continuations of a fast draft short.

    Args:
        tokens: to write, behind the prompt's own.
        steps: pending tokens → tokens that are drafted during their verification.
        in_turn: a verification and its drafts take their sum, not the longer of the two.

    >>> overlapped_seconds(4, 1.0, (0.5, {1: 1.0}), lambda pending: 2)
    3.0
    """
    draft, longest = passes[0], max(steps(0), serial)
    while (further := max(map(steps, range(longest + 1)))) > longest:
        longest = further
    verify = [seconds_at(passes[1], pending + 1) for pending in range(longest + 1)]
    fresh = [0.0]  # tokens left → seconds from the beginning of a cycle
    going = [[0.0]]  # tokens left → pending drafts → seconds from their verification on
    for left in range(1, tokens + 1):
        lost = after_rejection(left, alpha, fresh, longest + 1)
        row = []
        for pending in range(min(longest, left) + 1):
            drafted = min(steps(pending), left - pending)
            judged = pending + min(1, drafted)
            if drafted:
                both = verify[pending], drafted * draft
                taken = sum(both) if in_turn else max(both)
                kept = going[left - judged][drafted - 1]
            else:  # nothing is left to draft
                taken, kept = verify[pending], fresh[max(0, left - pending - 1)]
            row.append(taken + alpha**judged * kept + lost[judged])
        going.append(row)
        begun = min(serial, left - 1)
        fresh.append(begun * draft + row[begun])
    return fresh[tokens]


def sd_seconds(tokens: int, alpha: float, gamma: int, passes: Passes) -> float:
    """The same of speculative decoding with drafts of γ tokens on the same cores.

    >>> sd_seconds(4, 1.0, 1, (0.5, {1: 1.0, 2: 1.0}))
    3.0
    """
    draft, verify = passes
    fresh = [0.0]
    for left in range(1, tokens + 1):
        drafted = min(gamma, left - 1)
        lost = after_rejection(left, alpha, fresh, drafted)
        behind = alpha**drafted * fresh[left - drafted - 1] + lost[drafted]
        fresh.append(drafted * draft + seconds_at(verify, drafted + 1) + behind)
    return fresh[tokens]


def after_rejection(left: int, alpha: float, fresh: Sequence[float], most: int) -> list[float]:
    """judged tokens, 0 to `most` → Σ over the first rejected one of its chance and the seconds that
    are left behind it.

    Args:
        left: tokens to write; the accepted ones and the correction count.
        fresh: tokens left → seconds, below `left`.
    """
    sums = [0.0]
    for accepted in range(most):
        sums.append(sums[-1] + alpha**accepted * (1 - alpha) * fresh[max(0, left - accepted - 1)])
    return sums
