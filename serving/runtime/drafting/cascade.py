"""Several drafters in order of their cost: the first that has a proposal makes it."""

from __future__ import annotations

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.protocols import Drafter
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft


class Cascade:
    """Ask each drafter in turn until one proposes something, for example n-grams first and a draft
    model where none matches.

    A proposal comes whole from one drafter. A schedule may join two (SPIDE's does): every token
    keeps the distribution that it was drawn from, or none where it was proposed deterministically.
    Confidences are recorded by all drafters or by none.

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
