"""Several drafters in order of their cost: the first that has a proposal makes it."""

from __future__ import annotations

from serving.runtime.commands import Step
from serving.runtime.protocols import Drafter
from serving.runtime.session.session import Session
from serving.runtime.types import Draft


class Cascade:
    """Ask each drafter in turn until one proposes something, for example n-grams first and a draft model where none matches.

    A proposal comes whole from one drafter, so its distributions are all there or, of a deterministic one, all absent. A
    schedule that joins two proposals into one (SPIDE's) needs drafters of one kind.

    Args:
        drafters: cheapest first; each belongs to one request.
    """

    def __init__(self, *drafters: Drafter):
        self.drafters = drafters

    def propose(self, session: Session, limit: int, pending: Draft | None = None) -> Step[Draft]:
        draft = Draft()
        for drafter in self.drafters:
            draft = yield from drafter.propose(session, limit, pending)
            if len(draft):
                break
        return draft
