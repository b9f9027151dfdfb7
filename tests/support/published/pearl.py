"""PEARL as in smart-lty/ParallelSpeculativeDecoding, `src/engine.py`
(`parallel_speculative_decoding`)."""

from __future__ import annotations

from tests.support.models.enumeration import Oracle
from tests.support.published.decoding import Decoded, Reader, Round, draft, residual


def pearl(
    target: Reader,
    drafter: Reader,
    source: Oracle,
    prompt: list[int],
    max_tokens: int,
    gamma: int,
    *,
    seeds_by_place: bool = False,
) -> Decoded:
    """Two modes. Pre-verify tests x_1 of a draft; kept, the whole draft joins the text. Post-verify
    tests the gamma − 1 others and x_1 of the next draft, which joins the text if all are kept.

    Args:
        seeds_by_place: as published, where the generator is seeded with the text's length before
            each test: pre-verify's test of x_1 and post-verify's first, of x_2, are of the same
            uniform r. Without it all tests are independent.
    """
    ids, rounds = list(prompt), []
    pre_verify, before = True, 1.0  # before: r of the test before is known to be below this
    while len(ids) < len(prompt) + max_tokens:
        length = len(ids)
        tokens, q = draft(drafter, source, ids, gamma)
        # place of the first token that is tested
        first = length if pre_verify else length - gamma + 1
        tested = [*ids[first:], tokens[0]]
        q_tested = [drafter.probs(ids[:place]) for place in range(first, length)] + q[:1]
        kept, chance = 0, 1.0
        while kept < len(tested):
            p = target.probs(ids[: first + kept])
            chance = min(1.0, float(p[tested[kept]]) / float(q_tested[kept][tested[kept]]))
            if not source.accepts(chance, before if kept == 0 else 1.0):
                break
            kept += 1
        rounds.append(Round(gamma, min(kept + 1, len(tested)), kept))
        before = chance if pre_verify and kept and seeds_by_place else 1.0
        if kept == len(tested):
            ids += tokens
            pre_verify = False
        else:
            p = target.probs(ids[: first + kept])
            ids = [*ids[: first + kept], source.draw(residual(p, q_tested[kept]))]
            pre_verify = True
    return Decoded(ids[len(prompt) :], rounds, 0 if pre_verify else gamma - 1)
