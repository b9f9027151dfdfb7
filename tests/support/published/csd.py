"""CSD's Algorithm 1, line by line from the paper; the comments name its lines. It is one call of
the target; the loop around it, which the paper does not write down, ends with the budget as ours
does."""

from __future__ import annotations

from typing import Any

from tests.support.published.decoding import Decoded, Reader, Round, draft, residual

Memory = dict[tuple[int, int], int]
"""T of the paper: (draft token, correction) → how often."""


def csd_step(
    target: Reader,
    drafter: Reader,
    source: Any,
    x: list[int],
    gamma: int,
    memory: Memory,
    frequency: float,
    tau: float,
) -> tuple[list[int], int, int, int]:
    """Algorithm 1; returns the text, and how many tokens it judged, kept and rescued.

    Args:
        source: `draft`, `test` and `sample` are its random streams.
        frequency: λ.
    """
    drafted, q = draft(drafter, source.draft, x, gamma)  # 1 to 4
    p = [target.probs(x + drafted[:i]) for i in range(gamma + 1)]  # 5
    n = rescued = 0  # 6
    for i in range(gamma):  # 7
        token = drafted[i]
        if source.test.accepts(float(p[i][token]), float(q[i][token])):  # 8 to 10
            n += 1  # 11
            continue
        correction = source.sample.draw(residual(p[i], q[i]))  # 13, 14
        is_frequent = memory.get((token, correction), 0) >= frequency  # 16
        # p at temperature 1, whatever the request's
        plain = target.read(x + drafted[:i])[0].softmax(-1)
        is_safe = float(plain[token]) / float(plain[correction]) >= tau  # 17
        memory[token, correction] = memory.get((token, correction), 0) + 1  # 18
        if is_frequent and is_safe:  # 19
            n += 1  # 20
            rescued += 1
        else:
            return [*x, *drafted[:n], correction], i + 1, n, rescued  # 22
    return [*x, *drafted, source.sample.draw(p[gamma])], gamma, n, rescued  # 26, 27


def csd(
    target: Reader,
    drafter: Reader,
    source: Any,
    prompt: list[int],
    max_tokens: int,
    gamma: int,
    memory: Memory,
    frequency: float = 6,
    tau: float = 0.01,
) -> tuple[Decoded, int]:
    """Algorithm 1 again and again, and how many tokens it rescued. A draft leaves room for the
    token that is sampled after it."""
    x, end, rounds, rescued = list(prompt), len(prompt) + max_tokens, list[Round](), 0
    while len(x) < end:
        length = min(gamma, end - len(x) - 1)
        x, judged, kept, saved = csd_step(
            target, drafter, source, x, length, memory, frequency, tau
        )
        rounds.append(Round(length, judged, kept))
        rescued += saved
    return Decoded(x[len(prompt) :], rounds), rescued
