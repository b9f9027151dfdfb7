"""Serial schedule: draft, verify, draft, verify (Leviathan 2023, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.protocols import AcceptanceRule, Drafter
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft, Verdict


def serial(
    session: Session,
    drafter: Drafter,
    rule: AcceptanceRule,
    learn: Callable[[Draft, Verdict], None] | None = None,
    *,
    draft_first: bool = False,
) -> Step[None]:
    """Run a request to its end.

    Args:
        draft_first: draft behind the prompt before the target reads it, which then judges the draft
            in the same pass.
        learn: called between verifications with what was judged; the only place where online state
            may change.
    """
    if not draft_first:
        yield from session.prefill()
    while not session.text.finished:
        if (yield from session.follow_prediction()):
            continue
        draft = yield from drafter.propose(session, session.draft_room(1))
        rows = yield from session.verify(draft)
        verdict = rule.judge(draft, rows, session.rng)
        session.commit(draft, verdict, rows)
        if learn:
            learn(draft, verdict)
