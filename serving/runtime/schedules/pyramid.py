"""PyramidSD's schedule: the draft proposes to a qualifier, the qualifier to the target (PyramidSD,
section 3.2, Figure 1).

Inner round: the draft proposes up to l_D tokens, the qualifier judges them and adds a token of its
own (a correction or the bonus, which counts), until l_Q tokens are ready; the last inner round
drafts min(l_D, l_Q − ready − 1). Outer round: the target judges the ready tokens against the
qualifier's distributions, which were kept, and adds its own token. A rejection at either stage
rolls back every model that has read too far.
"""

from __future__ import annotations

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.protocols import AcceptanceRule, Drafter
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft


def pyramid(
    session: Session,
    drafter: Drafter,
    qualifies: AcceptanceRule,
    accepts: AcceptanceRule,
    num_ready: int,
) -> Step[None]:
    """Run a request to its end.

    Args:
        drafter: proposes l_D tokens at most.
        qualifies: the qualifier's rule.
        accepts: the target's rule; the draft it judges carries the qualifier's distributions.
        num_ready: l_Q >= 1, tokens that the target judges at once.
    """
    yield from session.prefill()
    text = session.text
    while not text.finished:
        if (yield from session.follow_prediction()):
            continue
        ready = yield from qualify(
            session, drafter, qualifies, min(num_ready, session.draft_room(1))
        )
        session.stats.drafted += len(ready)
        rows = yield from session.verify(ready)
        session.commit(ready, (yield from accepts.judge(ready, rows, session.rng)), rows)


def qualify(session: Session, drafter: Drafter, rule: AcceptanceRule, count: int) -> Step[Draft]:
    """`count` qualified tokens, fewer if a stop token ends them, with the qualifier's distribution
    of each."""
    ready = Draft()
    while len(ready) < count:
        before = session.text.ids + ready.tokens
        draft = yield from drafter.propose(session, count - len(ready) - 1, ready)
        rows = yield from session.qualifier.read(before + draft.tokens, keep=len(draft) + 1)
        verdict = yield from rule.judge(draft, rows, session.rng)
        session.stats.count_inner(draft, verdict)
        tokens = draft.tokens[: verdict.accepted] + (
            [] if verdict.token is None else [verdict.token]
        )
        ready += Draft(tokens, [rows[i] for i in range(len(tokens))])
        if verdict.rejected:
            for lane in (session.draft, session.qualifier):
                lane.rollback(len(before) + verdict.accepted)
        if tokens[-1] in session.sampling.stop_token_ids:
            break
    return ready
