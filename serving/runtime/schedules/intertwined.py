"""SPIDE's schedule: serial drafting and parallel verification, intertwined (SPIDE, Algorithm 1).

Serial: draft until the stop policy says that verification pays. Parallel: while the target verifies
the k unverified tokens, the draft continues for s tokens; the first of them, x_{k+1}, is tested on
the row that would have given the bonus. All kept: stay parallel with the other s − 1 as the next
unverified tokens. A rejection drops everything after it and goes back to serial.

Where Algorithm 1 read literally is wrong (lines 28, 32, 33, 38), the reading of PAPERS.md
holds: x_{k+1} is never tested twice, and unverified tokens are a pending draft, not text.
"""

from __future__ import annotations

from collections.abc import Callable

from draftwell.serving.runtime.commands import Overlap, Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.protocols import AcceptanceRule, Drafter
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft, Verdict


def intertwined(
    session: Session,
    drafter: Drafter,
    continuation: Drafter,
    rule: AcceptanceRule,
    overlap_steps: Callable[[int], int],
    learn: Callable[[Draft, Verdict], None],
) -> Step[None]:
    """Run a request to its end.

    Args:
        drafter: drafts in the serial phase.
        continuation: drafts during a verification.
        overlap_steps: k → s >= 1, how many tokens the draft makes while the target verifies k.
        learn: called after each verification with what was judged.
    """
    yield from session.prefill()
    text = session.text
    while not text.finished:
        if (yield from session.follow_prediction()):
            continue
        pending = yield from drafter.propose(session, session.draft_room(1))
        rejected = False
        while not rejected and not text.finished:
            ahead = yield from verify_and_go_on(
                session, pending, continuation, overlap_steps(len(pending))
            )
            rows, more = ahead
            judged = pending + more[:1]
            bonus = not len(more) and len(pending) < text.remaining
            verdict = yield from rule.judge(judged, rows, session.rng, bonus=bonus)
            session.commit(judged, verdict, rows)
            learn(judged, verdict)
            # A bonus means that the draft had stopped (budget): the next draft starts serially
            # again.
            rejected = verdict.token is not None
            pending = more[1:]


def verify_and_go_on(
    session: Session, pending: Draft, continuation: Drafter, steps: int
) -> Step[tuple[Span, Draft]]:
    """Target rows for `pending` and the next position, and at most `steps` tokens drafted
    meanwhile."""
    ended = pending.tokens[-1:] and pending.tokens[-1] in session.sampling.stop_token_ids
    limit = 0 if ended else min(steps, session.draft_room(len(pending)))
    if limit == 0:
        return (yield from session.verify(pending)), Draft()
    both: tuple[Span, Draft] = yield Overlap(
        session.verify(pending), continuation.propose(session, limit, pending)
    )
    return both
