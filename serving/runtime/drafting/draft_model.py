"""Drafting with a draft model, one token at a time, under a stop policy."""

from __future__ import annotations

from serving.runtime.session import Session
from serving.runtime.types import Draft, Step, StopPolicy


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
        draft = Draft()
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
        session.stats.drafted += len(draft)
        return draft
