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


def run_lengths(alpha: float, gamma: int) -> float:
    """MAT of a strategy whose drafts nothing cuts short over SD's, with tokens of one chance each:
    1 / (1 − α^γ).

    >>> round(run_lengths(0.95, 11), 2), round(run_lengths(0.5, 1), 2)
    (2.32, 2.0)
    """
    return 1 / (1 - alpha**gamma)


def leviathan_speedup(alpha: float, gamma: int, c: float) -> float:
    """Expected speed-up over plain decoding (Leviathan 2023, Theorem 3.8).

    Args:
        c: seconds of a draft pass over those of a target pass, which is assumed to take as long for
            γ + 1 tokens as for one.

    >>> round(leviathan_speedup(0.8, 5, 0.05), 2)
    2.95
    """
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def sd_speedup(
    alpha: float,
    gamma: int,
    plain: float,
    draft: float,
    verify: Mapping[int, float],
    rest: float = 0.0,
) -> float:
    """The same with what passes were measured to take.

    Args:
        plain: seconds of a target pass over one token in plain decoding.
        draft: seconds of a draft pass.
        verify: tokens → seconds of a target pass.
        rest: seconds of a round outside passes.

    >>> sd_speedup(1.0, 1, 1.0, 0.5, {1: 1.0, 2: 1.5})
    1.0
    """
    return (
        expected_tokens(alpha, gamma)
        * (plain + rest)
        / (gamma * draft + seconds_at(verify, gamma + 1) + rest)
    )


def best_gamma(alpha: float, draft: float, verify: Mapping[int, float], rest: float = 0.0) -> int:
    """The draft length with the largest `sd_speedup`."""
    return max(
        range(1, MOST_GAMMAS + 1),
        key=lambda gamma: sd_speedup(alpha, gamma, 1.0, draft, verify, rest),
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


def spide_seconds(
    tokens: int,
    alpha: float,
    tau: float,
    alone: Passes,
    busy: Passes,
    rest: float = 0.0,
    cap: int = 32,
) -> float:
    """Seconds in which SPIDE's Algorithm 1 writes a text, where every draft token has the same
    chance α: what overlapping alone gains.

    A cycle begins serially with k drafts. The target then judges these and the continuation's first
    token while s more are drafted; as long as all are kept it judges s more each time (s − 1 that
    are left over and the next first token); a rejection ends the cycle. No draft goes beyond the
    text: in short answers that keeps continuations of a fast draft short.

    Args:
        tokens: to write, behind the prompt's own.
        tau: SPIDE's threshold.
        alone: passes with the other model idle.
        busy: passes with both at once.
        rest: seconds of a target call outside passes.
        cap: longest draft.

    >>> spide_seconds(1, 0.5, 0.7, (0.1, {1: 1.0, 2: 1.0}), (0.1, {1: 1.0, 2: 1.0}))
    1.0
    """
    verify = [seconds_at(busy[1], pending + 1) for pending in range(cap + 1)]
    fitting = [min(cap, max(1, math.floor(seconds / busy[0]))) for seconds in verify]
    serial = serial_length(alpha, tau, cap)
    return overlapped_seconds(
        tokens, alpha, busy, fitting.__getitem__, serial=serial, alone=alone, rest=rest
    )


def overlapped_seconds(
    tokens: int,
    alpha: float,
    busy: Passes,
    steps: Callable[[int], int],
    *,
    serial: int = 0,
    alone: Passes | None = None,
    rest: float = 0.0,
    in_turn: bool = False,
) -> float:
    """Seconds in which a strategy that drafts on while the target verifies writes a text; the
    cycles are those of `spide_seconds`, with `serial` drafts first.

    Args:
        busy, alone, rest: as in `spide_seconds`; no `alone`: no model slows the other.
        steps: pending tokens → tokens that are drafted during their verification.
        in_turn: a verification and its drafts take their sum, not the longer of the two.

    >>> overlapped_seconds(4, 1.0, (0.5, {1: 1.0}), lambda pending: 2)
    3.0
    """
    draft, alone = busy[0], alone or busy
    longest = max(steps(0), serial)
    while (further := max(map(steps, range(longest + 1)))) > longest:
        longest = further
    verify, verify_alone = (
        [seconds_at(times, pending + 1) for pending in range(longest + 1)]
        for times in (busy[1], alone[1])
    )
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
                taken, kept = verify_alone[pending], fresh[max(0, left - pending - 1)]
            row.append(taken + alpha**judged * kept + lost[judged] + rest)
        going.append(row)
        begun = min(serial, left - 1)
        fresh.append(begun * alone[0] + row[begun])
    return fresh[tokens]


def sd_seconds(tokens: int, alpha: float, gamma: int, alone: Passes, rest: float = 0.0) -> float:
    """The same of speculative decoding with drafts of γ tokens on the same cores.

    >>> sd_seconds(4, 1.0, 1, (0.5, {1: 1.0, 2: 1.0}))
    3.0
    """
    draft, verify = alone
    fresh = [0.0]
    for left in range(1, tokens + 1):
        drafted = min(gamma, left - 1)
        lost = after_rejection(left, alpha, fresh, drafted)
        behind = alpha**drafted * fresh[left - drafted - 1] + lost[drafted]
        fresh.append(drafted * draft + seconds_at(verify, drafted + 1) + rest + behind)
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


def expected_run(true_positive: float, false_positive: float, acceptable: int) -> float:
    """Draft tokens that SPRINTER's verifier accepts before its first rejection (Theorem 3.3).

    Args:
        true_positive, false_positive: chances that it accepts an acceptable and an unacceptable
            token, below 1.
        acceptable: r: so many tokens are acceptable, all further ones are not.
    """
    return _before(true_positive, acceptable) - 1 + true_positive**acceptable / (1 - false_positive)


def expected_stop(
    true_positive: float, false_positive: float, acceptable: int, draft_seconds: float
) -> float:
    """Seconds until that rejection, where the verifier takes none (Theorem 3.4); arguments as in
    `expected_run`."""
    return draft_seconds * (
        _before(true_positive, acceptable) + true_positive**acceptable / (1 - false_positive)
    )


def _before(true_positive: float, acceptable: int) -> float:
    """1 + η + … + η^(r − 1)."""
    return float(sum(true_positive**i for i in range(acceptable)))


def sprinter_acceptance(false_positive: float, total_variation: float) -> float:
    """Chance that a draft token stays in SPRINTER's text (Theorem A.4).

    >>> sprinter_acceptance(0.0, 0.25), sprinter_acceptance(1.0, 0.25)
    (0.75, 1.0)
    """
    return 1 - (1 - false_positive) * total_variation


def sd_flops(gamma: int, draft: float, target: float) -> float:
    """FLOPs of one run of speculative decoding (SPRINTER, Eq. 5); `draft`, `target`: FLOPs of a
    pass over one token."""
    return gamma * (draft + target)


def sprinter_flops(gamma: int, draft: float, target: float, verifier: float = 0.0) -> float:
    """FLOPs of one run of SPRINTER with a perfect verifier (Eq. 6): the target is charged one
    token, however many it has to read."""
    return gamma * (draft + verifier) + target


def forward_flops(layers: int, hidden: int, heads: int, vocab: int, context: int) -> float:
    """FLOPs of a pass over one token of a GPT-2-like model (Hoffmann 2022, Appendix F; SPRINTER,
    A.8).

    Embeddings count as a product with the vocabulary, the feed-forward network is four times as
    wide as the states, and every token attends over a full context.

    Args:
        context: positions that a token attends over.

    >>> round(
    ...     20 * forward_flops(12, 768, 12, 50257, 1024) / 1e9, 2
    ... )  # GPT-2 Small, 20 tokens: 7.25 billion in the paper
    7.25
    """
    embeddings_and_logits = 2 * 2 * vocab * hidden
    products = 24 * hidden**2  # queries, keys and values 6, output 2, feed-forward 16
    attention = 4 * context * hidden + 3 * heads * context
    return float(embeddings_and_logits + layers * (products + attention))
