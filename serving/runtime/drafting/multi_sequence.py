"""Dynamic multi-sequence drafting: several sequences where the draft is unsure of its first token
(DuoDecoding, section 3.2).

With p̄_(i,j) the draft's raw probability of the j-th ranked token at position i of its greedy
continuation: rank 1 always starts a sequence, and rank j does while p̄_(1,j) > theta = p̄_(1,1) ·
p̄_(2,1). The budget is shared evenly, so the number of sequences is rounded down to a divisor of it
(ours; the paper takes budgets that divide). Everything is deterministic: each sequence continues
with its argmax.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from draftwell.serving.runtime.commands import Overlap, Step
from draftwell.serving.runtime.session.lane import DraftSequence, Lane
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft


def sequences_in(chances: Sequence[float], theta: float, budget: int) -> int:
    """How many sequences a budget is shared by.

    Args:
        chances: p̄_(1,1), p̄_(1,2) …, descending.

    >>> sequences_in([0.3, 0.2, 0.15, 0.12, 0.1, 0.01], theta=0.06, budget=24)
    4
    """
    unsure = 1 + sum(chance > theta for chance in chances[1:])
    return next(count for count in range(min(unsure, budget), 0, -1) if budget % count == 0)


class MultiSequence:
    """Drafts one to `max_sequences` sequences, all but the first on branches of the draft's lane.

    Args:
        static: always as many, however sure the draft is; what they cannot share evenly of the
            budget is not drafted.
        longest: most tokens of a sequence, whatever the budget; None: no limit.
    """

    def __init__(self, max_sequences: int = 8, *, static: bool = False, longest: int | None = None):
        self.max_sequences, self.static, self.longest = max_sequences, static, longest

    def propose(
        self, session: Session, budget: int, limit: int, pending: Draft
    ) -> Step[list[DraftSequence]]:
        main, before, stops = (
            session.draft,
            session.text.ids + pending.tokens,
            session.sampling.stop_token_ids,
        )
        row = yield from main.read(before)
        raw = row.raw(0)
        ranked = raw.topk(min(self.max_sequences, budget, len(raw)))
        chances, firsts = ranked.values.tolist(), ranked.indices.tolist()
        best = row.top[0]
        if (session.sampling.penalises or session.sampling.biases) and firsts[0] != best:
            # raw probabilities know nothing of penalties and biases, by which the target will be
            # asked
            firsts = [best, *(token for token in firsts if token != best)][: len(firsts)]
            chances = raw[firsts].tolist()
        starts = [[token] for token in firsts]
        count = 1
        if budget > 1:
            second = yield from main.read([*before, firsts[0]])
            starts[0].append(second.top[0])
            count = (
                len(firsts)
                if self.static
                else sequences_in(chances, chances[0] * second.confidence(0), budget)
            )
        length = min(budget // count, limit, self.longest or limit)
        lanes = (
            [main] * count
            if length == 1
            else [main, *(main.branch(i, len(before)) for i in range(count - 1))]
        )
        drafts = yield Overlap(
            *(
                continue_greedily(lane, before, start, length, stops)
                for lane, start in zip(lanes, starts, strict=False)
            )
        )
        session.stats.drafted += sum(map(len, drafts))
        return [DraftSequence(draft, lane) for draft, lane in zip(drafts, lanes, strict=True)]


def continue_greedily(
    lane: Lane, before: list[int], start: list[int], length: int, stops: Collection[int]
) -> Step[Draft]:
    """Argmax continuation of a sequence to `length` tokens, or to a stop token."""
    tokens = start[:1] if start[0] in stops else start[:length]
    while len(tokens) < length and tokens[-1] not in stops:
        row = yield from lane.read(before + tokens)
        tokens.append(row.top[0])
    return Draft(tokens)
