"""The target drafts for itself with some of its sublayers skipped, and searches which (SWIFT, Xia
2024, 2410.06916, section 4).

The search, between verifications: of the text's last tokens the model predicts each with the
sublayers of a random candidate skipped; a candidate that is right more often than the set in use
takes its place.
"""

from __future__ import annotations

import random

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import drafted
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft, StopPolicy

GOOD_ENOUGH = 0.95
"""Share of right predictions at which no candidate is tried (the code's `max_score`)."""
MOST_TRIALS, MOST_FAILURES = 1000, 300
"""Candidates after which, and failures in a row after which, the search ends (the code's
`max_opt_iter` and `max_tolerance_iter`)."""


class SkipSearch:
    """The set of sublayers that is skipped, and its random search; one object may serve many
    requests of one model.

    The first and the last layer always stay. The first set are whole layers at equal distances.

    Args:
        sublayers: of the model: attention and feed-forward of each layer in turn.
        ratio: share of them that is skipped.

    >>> sorted(SkipSearch(16, 0.375).best)
    [2, 3, 6, 7, 10, 11]
    """

    def __init__(self, sublayers: int, ratio: float):
        self.sublayers, inner = sublayers, range(2, sublayers - 2)
        self._inner, self._count = inner, min(2 * round(ratio * sublayers / 2), len(inner))
        layers, whole = len(inner) // 2, self._count // 2
        self.best = frozenset(
            2 * (1 + i * layers // whole) + part for i in range(whole) for part in (0, 1)
        )
        self._random = random.Random(0)
        self.trials = self.failures = 0

    @property
    def over(self) -> bool:
        """Whether nothing is tried any more."""
        return (
            not 0 < self._count < len(self._inner)
            or self.trials >= MOST_TRIALS
            or self.failures >= MOST_FAILURES
        )

    def candidate(self) -> frozenset[int]:
        """Another set, drawn evenly from all of this size."""
        return frozenset(self._random.sample(self._inner, self._count))

    def learn(
        self, compared: frozenset[int], right: int, candidate: frozenset[int], candidate_right: int
    ) -> None:
        """Take in how often two sets were right on the same tokens; `compared` was `best` when they
        were."""
        self.trials += 1
        # else another request has moved it meanwhile
        if candidate_right > right and compared == self.best:
            self.best, self.failures = candidate, 0
        else:
            self.failures += 1


class SelfDraft:
    """A `Drafter` over the target's own slot; it drafts nothing where the target cannot skip
    (`Lane.skips`). It serves one request.

    Args:
        stop: the stop policy, which belongs to the request.
        interval: rounds between two candidates of the search; 0: none are tried.
        window: tokens of the text that a candidate is tried on.
    """

    def __init__(
        self, search: SkipSearch, stop: StopPolicy, *, interval: int = 0, window: int = 32
    ):
        self.search, self.stop, self.interval, self.window = search, stop, interval, window
        self._rounds = 0

    def propose(self, session: Session, limit: int, pending: Draft | None = None) -> Step[Draft]:
        lane = session.target
        if limit == 0 or not lane.skips:
            return Draft()
        before = session.text.ids + (pending.tokens if pending else [])
        self._rounds += 1
        if self.interval and self._rounds % self.interval == 0 and not self.search.over:
            yield from self._try_candidate(session)
        skip = self.search.best
        draft = yield from drafted(
            session, self.stop, limit, lambda draft: lane.skim(before + draft.tokens, skip)
        )
        lane.rollback(lane.length)
        return draft

    def _try_candidate(self, session: Session) -> Step[None]:
        """Compare the set in use with a candidate on the last tokens of the text, on a branch: the
        slot's own keys and values stay."""
        read, window = session.target.length, self.window
        if read <= window or session.draft_limit < window:  # a busy server has no time for it
            return
        text, right = session.text.ids[: read + 1], []
        for skip in (best := self.search.best, candidate := self.search.candidate()):
            branch = session.target.branch(0, read - window)
            rows = yield from branch.skim(text[:read], skip, window)
            right.append(
                sum(
                    said == token
                    for said, token in zip(rows.top, text[read - window + 1 :], strict=True)
                )
            )
            if right[0] >= GOOD_ENOUGH * window:
                return
        self.search.learn(best, right[0], candidate, right[1])
