"""PEARL's schedule: draft and target always run at once (PEARL 2024, 2408.11850).

Pre-verify: while the draft makes gamma tokens x_1..x_gamma, the target gives the row for x_1 alone.
Rejected: residual, and pre-verify again. Accepted: post-verify. The target reads x_2..x_gamma while
the draft makes the next gamma tokens, and the first of those is tested on the row after x_gamma.
All kept: the other gamma − 1 are the next unverified tokens. A rejection at i drops everything
after it and goes back to pre-verify.

Pre-verify is post-verify with nothing unverified, so one loop serves both. Every token is tested
once; there is no bonus, because the row that would give it tests the next draft's first token.
"""

from __future__ import annotations

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.protocols import AcceptanceRule, Drafter
from draftwell.serving.runtime.schedules.intertwined import verify_and_go_on
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft


def parallel(session: Session, drafter: Drafter, rule: AcceptanceRule, gamma: int) -> Step[None]:
    """Run a request to its end. The prompt's forward pass already pre-verifies.

    Args:
        drafter: drafts `gamma` >= 1 tokens where nothing else ends the draft.
    """
    pending = Draft()
    while not session.text.finished:
        if not len(pending) and (yield from session.follow_prediction()):
            continue
        if session.longest_draft == 0 and not len(pending):
            yield from session.decode_plainly()
            continue
        rows, more = yield from verify_and_go_on(session, pending, drafter, gamma)
        judged = pending + more[:1]
        verdict = yield from rule.judge(judged, rows, session.rng, bonus=False)
        session.commit(judged, verdict, rows)
        pending = Draft() if verdict.rejected else more[1:]
