"""Ranked candidates for one position, exactly (docs/methods.md, DuoDecoding; the exact rule with
one-hot proposals in turn).

Candidate x is kept with probability p(x). Else p(x) is zeroed, p renormalised, and the next
candidate tested on what is left; after the last one a token is sampled from it. Whatever the
candidates are, the token follows p: candidate j is kept with probability (1 − p(x_1) − … −
p(x_{j−1})) · p(x_j) / (1 − p(x_1) − … − p(x_{j−1})) = p(x_j). DuoDecoding's Algorithm 2 never
updates p between candidates, which is not exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from draftwell.serving.runtime.acceptance.exact import one_hot
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.sampling import residual
from draftwell.serving.runtime.types import CandidateChoice, Rows


class Ranked:
    """The lossless rule for alternatives."""

    lossless: ClassVar[bool] = True

    def choose(
        self, candidates: Sequence[int], row: int, target: Rows, rng: Streams
    ) -> CandidateChoice:
        if target.sampling.greedy:
            best = target.top[row]
            kept = candidates.index(best) if best in candidates else None
            return CandidateChoice(kept, best, len(candidates) if kept is None else kept + 1)
        left = target.probs(row)
        for rank, token in enumerate(candidates):
            if rng.test.accepts(float(left[token]), 1.0):
                return CandidateChoice(rank, token, rank + 1)
            left = self.zeroed(left, token)
        return CandidateChoice(None, rng.sample.draw(left), len(candidates))

    def zeroed(self, probs: Tensor, token: int) -> Tensor:
        """`probs` `[vocab]` without a token, renormalised; as they were if rounding rejected a
        token that had all the mass."""
        return residual(probs, one_hot(token, probs))
