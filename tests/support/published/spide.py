"""SPIDE's Algorithm 1, line by line from the paper's appendix A; the comments name its lines.

Read to the letter the algorithm does not decode: line 28's minimum over {k} never reaches the
k + 1 that line 30 asks for, line 33's k = s tests x_{k+1} a second time, line 38 drops the prefix,
and a draft that fills line 5's budget is never verified. `Letter` switches each of these readings
on; without any of them a line says what the paper's text says (section 3.2). The algorithm knows
no stop tokens.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from tests.support.published.decoding import Decoded, Reader, Round, residual


class Letter(enum.Flag):
    """Lines that are taken to the letter."""

    NONE = 0
    NEVER_ALL = enum.auto()
    """28: n is at most k, so that x_{k+1} counts as rejected whatever became of it."""
    TWICE = enum.auto()
    """33: k = s, so that x_{k+1} is among the tokens that are verified next."""


class MappingTable:
    """Figure 4: how many tokens of each of 20 intervals of confidence were drafted and accepted.

    Args:
        total, accepted: `[20]`; no interval may be empty, because the paper names no rate for one.
    """

    def __init__(self, total: list[int], accepted: list[int]):
        self.total, self.accepted = list(total), list(accepted)

    @staticmethod
    def interval(confidence: float) -> int:
        """[0, 0.1) … [0.8, 0.9), [0.90, 0.91) … [0.99, 1.0), 1.0; the authors' numbers are
        bfloat16, in which everything from 1 − 2⁻⁹ on is 1.0."""
        if float(torch.tensor(confidence).bfloat16()) == 1.0:
            return 19
        if confidence < 0.9:
            return int(confidence * 10)
        return 9 + int((confidence - 0.9) * 100)

    def rate(self, confidence: float) -> float:
        b = self.interval(confidence)
        return self.accepted[b] / self.total[b]

    def count(self, confidence: float, accepted: bool) -> None:
        b = self.interval(confidence)
        self.total[b] += 1
        self.accepted[b] += accepted


def spide(
    target: Reader,
    drafter: Reader,
    source: Any,
    prompt: list[int],
    max_tokens: int,
    s: int,
    tau: float,
    table: MappingTable,
    letter: Letter = Letter.NONE,
) -> Decoded:
    """`x` is the paper's, with the unverified tokens at its end; so is what is returned, which may
    be cut inside a round.

    Drafts end with the budget, as ours do: the serial one where one more token fits, the
    continuation where none does, and a verification without a continuation yields the token that
    is sampled after a full draft (section 3.1). Uniforms are drawn as far as they decide.

    Args:
        source: `draft`, `test` and `sample` are its random streams.
    """
    x, end = list(prompt), len(prompt) + max_tokens
    q: list[Any] = [None] * len(prompt)  # of each token of x that was drafted
    confidence = [0.0] * len(prompt)  # raw probability of the likeliest token there
    mode, k, drafted, rounds = "serial", 0, 0, list[Round]()

    def draft_one() -> None:
        """Lines 6, 7 and 20 to 22."""
        nonlocal drafted
        q.append(drafter.probs(x))
        confidence.append(float(drafter.read(x)[0].softmax(-1).max()))
        x.append(source.draft.draw(q[-1]))
        drafted += 1

    while len(x) - k < end:  # 1; the k tokens at the end are no text yet
        if mode == "serial":  # 2
            gamma, k = 1.0, 0  # 4
            while len(x) < end - 1:  # 5
                draft_one()
                k += 1
                gamma *= table.rate(confidence[-1])  # 8 to 10
                if gamma <= tau:  # 11
                    break  # 13
            mode = "parallel"  # 12
            continue
        first = len(x) - k  # 18: the place of x_1
        more = min(s, end - len(x))
        for _ in range(more):  # 19
            draft_one()
        p = [target.probs(x[: first + i]) for i in range(k + 1)]  # 25
        tested = k + 1 if more else k
        n = 0  # 28: tokens before the first that is rejected
        while n < tested:
            token = x[first + n]
            if not source.test.accepts(float(p[n][token]), float(q[first + n][token])):  # 27, 28
                break
            n += 1
        judged = min(n + 1, tested)
        for i in range(judged):  # 29
            table.count(confidence[first + i], i < n)
        if Letter.NEVER_ALL in letter:
            n = min(n, k)
        rounds.append(Round(drafted, judged, n))
        drafted = 0
        if n == k + 1:  # 30
            k = more if Letter.TWICE in letter else more - 1  # 33; 32: x holds them already
            continue
        if n == tested == k and len(x) == end:  # they fill the budget
            k = 0
            break
        if n == tested:  # all are kept and nothing was drafted behind them
            y = source.sample.draw(p[n])
        else:
            y = source.sample.draw(residual(p[n], q[first + n]))  # 37
        del x[first + n :], q[first + n :], confidence[first + n :]
        x.append(y)  # 38, behind the prefix
        q.append(None)
        confidence.append(0.0)
        mode, k = "serial", 0  # 39
    return Decoded(x[len(prompt) : len(x) - k], rounds)
