"""FLy's verification by the equations of its section 2.2 (5 to 11), all positions at once; the loop
around it ends with the budget as ours does.

The paper's match Δ_i is an exact match; above temperature 0 it is here the test of speculative
decoding, as in the authors' vLLM pull request 53987.
"""

from __future__ import annotations

import math
from typing import Any

from tests.support.published.decoding import Decoded, Reader, Round, draft, residual


def fly_step(
    target: Reader,
    drafter: Reader,
    source: Any,
    x: list[int],
    gamma: int,
    theta: float,
    window: int,
    *,
    top3: bool = False,
) -> tuple[list[int], int, int]:
    """One round; returns the text, and the places s of the first rejected token, from 1 on, and
    how many were kept against the match.

    Args:
        top3: h as in AMD-AGI/FLy, `calculate_topk_entropy` with k = 3.
    """
    drafted, q = draft(drafter, source.draft, x, gamma)
    p = [target.probs(x + drafted[:i]) for i in range(gamma + 1)]
    matches = {
        j: source.test.accepts(float(p[j - 1][token]), float(q[j - 1][token]))
        for j, token in enumerate(drafted, 1)
    }
    mismatches = [j for j, match in matches.items() if not match]

    def h(j: int) -> float:  # Eq. 5
        raw = target.read(x + drafted[: j - 1])[0].softmax(-1).double()
        some = raw.topk(3).values if top3 else raw
        entropy = -float((some * some.log()).sum())
        return entropy if top3 else entropy / math.log(len(raw))

    strict = [j for j in mismatches if h(j) < theta]  # Eq. 6
    s_gate = min([*strict, gamma + 1])  # Eq. 7
    refused = []
    for j in mismatches:
        if h(j) >= theta:
            beyond = j + window > gamma
            further = sum(not matches.get(i, True) for i in range(j + 1, j + window + 1))  # Eq. 8
            if beyond or further:  # Eq. 9
                refused.append(j)
    s_defer = min([*refused, gamma + 1])  # Eq. 10
    s = min(s_gate, s_defer)  # Eq. 11
    kept = sum(j < s for j in mismatches)
    y = source.sample.draw(p[gamma] if s > gamma else residual(p[s - 1], q[s - 1]))
    return [*x, *drafted[: s - 1], y], s, kept


def fly(
    target: Reader,
    drafter: Reader,
    source: Any,
    prompt: list[int],
    max_tokens: int,
    gamma: int,
    theta: float,
    window: int,
    *,
    top3: bool = False,
) -> tuple[Decoded, int]:
    """Rounds until the budget is spent, and how many tokens were kept against the match."""
    x, end, rounds, kept = list(prompt), len(prompt) + max_tokens, list[Round](), 0
    while len(x) < end:
        length = min(gamma, end - len(x) - 1)
        x, s, stayed = fly_step(target, drafter, source, x, length, theta, window, top3=top3)
        rounds.append(Round(length, min(s, length), s - 1))
        kept += stayed
    return Decoded(x[len(prompt) :], rounds), kept
