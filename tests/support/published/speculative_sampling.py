"""Speculative sampling as in feifeibear/LLMSpeculativeSampling, `sampling/speculative_sampling.py`
(`speculative_sampling`)."""

from __future__ import annotations

from tests.support.models.enumeration import Oracle
from tests.support.published.decoding import Decoded, Reader, Round, draft, residual


def speculative_sampling(
    target: Reader, drafter: Reader, source: Oracle, prompt: list[int], max_len: int, gamma: int
) -> Decoded:
    """Draft gamma tokens, test them in order, then one token from the residual or as a bonus, until
    `max_len` tokens or more are there.

    The first round drafts, too; nothing ends a draft early, neither a stop token nor the budget.
    """
    ids, rounds = list(prompt), []
    while len(ids) < len(prompt) + max_len:
        tokens, q = draft(drafter, source, ids, gamma)
        p = [target.probs(ids + tokens[:i]) for i in range(gamma + 1)]
        kept = 0
        while kept < gamma and source.accepts(
            float(p[kept][tokens[kept]]), float(q[kept][tokens[kept]])
        ):
            kept += 1
        ids += tokens[:kept]
        ids.append(source.draw(p[gamma] if kept == gamma else residual(p[kept], q[kept])))
        rounds.append(Round(gamma, min(kept + 1, gamma), kept))
    return Decoded(ids[len(prompt) :], rounds)
