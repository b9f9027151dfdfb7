"""ASD's verification as its authors describe it (Kissmetothemoon/ASD, "How ASD Works"): the longest
prefix of a block whose mismatches fit, then the target's greedy token; the loop around it ends with
the budget of tokens as ours does.
"""

from __future__ import annotations

from tests.support.published.decoding import Decoded, Reader, Round


def longest_prefix(
    regrets: list[float], spent: float, budget: float, g: float, m: int
) -> tuple[int, list[float]]:
    """Tokens of the block that are accepted, and the regrets of those that are no argmax.

    Args:
        regrets: r_i of each draft token; 0 for the target's argmax.
    """
    k = len(regrets)

    def feasible(length: int) -> bool:
        mismatches = [(i, r) for i, r in enumerate(regrets[:length]) if r > 0]
        return (
            spent + sum(r for _, r in mismatches) <= budget
            and all(r / (k - i) <= g for i, r in mismatches)
            and len(mismatches) <= m
        )

    accepted = max(length for length in range(k + 1) if feasible(length))
    return accepted, [r for r in regrets[:accepted] if r > 0]


def asd(
    target: Reader,
    drafter: Reader,
    prompt: list[int],
    max_tokens: int,
    gamma: int,
    budget: float,
    g: float,
    m: int,
) -> tuple[Decoded, int]:
    """Greedy rounds until all tokens are written, and how many were accepted against the target."""
    x, end, rounds, kept, spent = list(prompt), len(prompt) + max_tokens, list[Round](), 0, 0.0
    while len(x) < end:
        length = min(gamma, end - len(x) - 1)
        drafted: list[int] = []
        for _ in range(length):
            drafted.append(drafter.best(x + drafted))
        rows = [target.read(x + drafted[:i])[0] for i in range(length)]
        regrets = [
            float(row.max()) - float(row[token]) for row, token in zip(rows, drafted, strict=True)
        ]
        n, charged = longest_prefix(regrets, spent, budget, g, m)
        spent, kept = spent + sum(charged), kept + len(charged)
        x += [*drafted[:n], target.best(x + drafted[:n])]
        rounds.append(Round(length, min(n + 1, length), n))
    return Decoded(x[len(prompt) :], rounds), kept
