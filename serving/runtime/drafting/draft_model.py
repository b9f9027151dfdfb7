"""Drafting one token at a time under a stop policy, and the draft model that does."""

from __future__ import annotations

from collections.abc import Callable

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft, StopPolicy


class DraftModel:
    """Samples from the draft model until the policy, a stop token or the limit ends the draft.

    Exactly a `FixedLength`, none of its subclasses, is drafted in one command where the model can
    (`chain`): every other policy is asked about each token.

    Args:
        stop: the stop policy; it belongs to one request.
        with_confidence: also record C of every token.
    """

    def __init__(self, stop: StopPolicy, *, with_confidence: bool = False):
        self.stop, self.with_confidence = stop, with_confidence

    def propose(self, session: Session, limit: int, pending: Draft | None = None) -> Step[Draft]:
        before = session.text.ids + (pending.tokens if pending else [])
        if (
            type(self.stop) is FixedLength
            and not self.with_confidence
            and session.draft.chains
            and limit > 0
        ):
            return (yield from chain(session, before, min(limit, self.stop.max_draft)))
        return (
            yield from drafted(
                session,
                self.stop,
                limit,
                lambda draft: session.draft.read(before + draft.tokens),
                with_confidence=self.with_confidence,
            )
        )


def drafted(
    session: Session,
    stop: StopPolicy,
    limit: int,
    read: Callable[[Draft], Step[Span]],
    *,
    with_confidence: bool = False,
) -> Step[Draft]:
    """Sample token after token until the policy, a stop token or the limit ends the draft.

    Args:
        read: gives the row after the text and a draft.
        with_confidence: also record C of every token.
    """
    draft, most = Draft(), session.draft_limit
    stop.start()
    while len(draft) < limit:
        row = yield from read(draft)
        if stop.stop_before(row):
            break
        token, prob = yield from row.draw(0, session.rng.draft)
        draft.tokens.append(token)
        draft.rows.append(row)
        draft.probs.append(prob)
        if with_confidence:
            draft.confidence.append(row.confidence(0))
        if stop.stop_after(row, token) or token in session.sampling.stop_token_ids:
            break
    else:
        draft.cut = len(draft) >= most  # else the budget ended it
    session.stats.drafted += len(draft)
    return draft


def chain(session: Session, before: list[int], steps: int) -> Step[Draft]:
    """A greedy draft of fixed length in one command: the model chooses token after token where it
    computes, and is read once."""
    rows = yield from session.draft.read(before, steps=steps)
    length = next(
        (
            i
            for i, token in enumerate(rows.top, start=1)
            if token in session.sampling.stop_token_ids
        ),
        steps,
    )
    session.draft.rollback(len(before) + length - 1)
    session.stats.drafted += length
    return Draft(rows.top[:length], [rows[i] for i in range(length)], probs=[1.0] * length)
