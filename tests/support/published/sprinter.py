"""SPRINTER as in MeiyuZhong/SPRINTER, `sprinter.py` (`speculative_sampling_sprinter`), and its
paper's Algorithm 2 read literally."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.support.models.enumeration import Oracle
from tests.support.published.decoding import Decoded, Reader, Round, residual


def sprinter(
    target: Reader,
    drafter: Reader,
    score: Callable[[Tensor], float],
    source: Oracle,
    prompt: list[int],
    max_len: int,
    *,
    cap: int = 20,
    drops_flagged: bool = False,
) -> Decoded:
    """Draft until the verifier's score is below .5, or `cap` tokens are there; the target then
    tests the last of them alone.

    Args:
        score: of the draft's hidden state that a token was drawn from.
        drops_flagged: Algorithm 2 to the letter: the flagged token never joins the prefix. Where
            the test keeps it, a token drawn from p takes its place. The code keeps it and draws a
            bonus behind it.
    """
    ids, rounds = list(prompt), []
    while len(ids) < len(prompt) + max_len:
        run: list[int] = []
        while True:
            before = ids + run
            q = drafter.probs(before)
            run.append(source.draw(q))
            if score(drafter.read(before)[1]) < 0.5 or len(run) == cap:
                break
        p, flagged = target.probs(before), run[-1]
        kept = source.accepts(float(p[flagged]), float(q[flagged]))
        rounds.append(Round(len(run), len(run), len(run) - 1 + kept))
        if not kept:
            ids = [*before, source.draw(residual(p, q))]
        elif drops_flagged:
            ids = [*before, source.draw(p)]
        else:
            ids += run
            ids.append(source.draw(target.probs(ids)))
    return Decoded(ids[len(prompt) :], rounds)
