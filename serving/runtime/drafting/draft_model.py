"""Drafting with a draft model, one token at a time, under a stop policy."""

from __future__ import annotations

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.session.row_view import RowView
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft, StopPolicy


class DraftModel:
    """Samples from the draft model until the policy, a stop token or the limit ends the draft.

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
            return (yield from chain(session, before, min(limit, self.stop.num_tokens)))
        draft, most = Draft(), session.draft_limit
        self.stop.start()
        while len(draft) < limit:
            row = yield from session.draft.read(before + draft.tokens)
            if self.stop.stop_before(row):
                break
            token = row.sample(0, session.rng.draft)
            draft.tokens.append(token)
            draft.rows.append(row)
            if self.with_confidence:
                draft.confidence.append(row.confidence(0))
            if self.stop.stop_after(row, token) or token in session.sampling.stop_token_ids:
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
    return Draft(rows.top[:length], [RowView(rows, i) for i in range(length)])
