"""Who drafts how much in a round: its draft tokens go one by one to the request where the next one
is worth most for its price.

The k-th token of a draft is kept with probability α^k, α being the request's own acceptance, so
requests whose drafts are kept more get the longer ones. Its price is a row of the verification, and
drafting, which a longer text makes dearer: a row in a pass of the model that drafts, or a whole
further pass where nobody else drafts as far.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

LEAST_KEPT = 0.1
"""A token that is kept less often than this is not drafted, however much of the budget is left."""


@dataclass(frozen=True)
class Drafting:
    """What is known of a request's next draft.

    Args:
        kept: probability that a draft token is kept if those before it are, in [0, 1].
        seconds: of one more draft token in passes that run anyway, above 0.
        step: of a pass of the model that drafts; 0: it drafts without.
        drafter: requests with the same one share its passes.
        longest: tokens that its draft has at most.
    """

    kept: float
    seconds: float
    step: float = 0.0
    drafter: Hashable = None
    longest: int = 1


def give_out(tokens: int, requests: Sequence[Drafting]) -> list[int]:
    """Length of each request's draft, by marginal expected value.

    >>> give_out(6, [Drafting(0.8, 1.0, longest=8), Drafting(0.5, 1.0, longest=8)])
    [5, 1]
    >>> give_out(6, [Drafting(0.7, 1.0, longest=8), Drafting(0.7, 1.0, longest=8)])
    [3, 3]
    """
    lengths = [0] * len(requests)
    passes: dict[Hashable, int] = {}  # drafter → passes that somebody pays for already

    def worth(index: int) -> float:
        one, length = requests[index], lengths[index] + 1
        further = length > passes.get(one.drafter, 0)
        return float(one.kept**length / (one.seconds + (one.step if further else 0.0)))

    def wanted(index: int) -> bool:
        one, length = requests[index], lengths[index] + 1
        return length <= one.longest and one.kept**length >= LEAST_KEPT

    waiting = [(-worth(index), 0, index) for index in range(len(requests)) if wanted(index)]
    heapq.heapify(waiting)
    while tokens > 0 and waiting:
        index = heapq.heappop(waiting)[2]
        drafter = requests[index].drafter
        tokens -= 1
        lengths[index] += 1
        if lengths[index] > passes.get(drafter, 0):
            passes[drafter] = lengths[index]  # as far as this it is cheaper for the others now
            waiting = [(-worth(other), lengths[other], other) for _, _, other in waiting]
            heapq.heapify(waiting)
        if wanted(index):
            heapq.heappush(waiting, (-worth(index), lengths[index], index))
    return lengths
