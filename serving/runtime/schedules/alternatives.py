"""Serial schedule with alternatives: a draft is a chain, or a chain with tokens beside it that are
verified in the same pass (ours)."""

from __future__ import annotations

from typing import Protocol

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.protocols import AcceptanceRule, Drafter, TreeRule
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.trees import DraftTree, TreeVerdict
from draftwell.serving.runtime.types import Draft, Verdict


class WideningDrafter(Drafter, Protocol):
    """A drafter that may put alternatives beside its drafts, and learns from every verdict."""

    def widened(self, session: Session, draft: Draft) -> DraftTree | None:
        """The draft's tokens and, after them, the alternatives; None: the draft is verified as it
        is."""

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """What became of a draft."""

    def learn_tree(self, draft: Draft, tree: DraftTree, verdict: TreeVerdict) -> None:
        """What became of a draft with alternatives."""


def serial_with_alternatives(
    session: Session, drafter: WideningDrafter, rule: AcceptanceRule, tree_rule: TreeRule
) -> Step[None]:
    """Run a request to its end."""
    yield from session.prefill()
    while not session.text.finished:
        if (yield from session.follow_prediction()):
            continue
        draft = yield from drafter.propose(session, session.draft_room(1))
        tree = drafter.widened(session, draft)
        if tree is None:
            rows = yield from session.verify(draft)
            verdict = rule.judge(draft, rows, session.rng)
            session.commit(draft, verdict, rows)
            drafter.learn(draft, verdict)
        else:
            rows = yield from session.verify_tree(tree)
            found = tree_rule.judge(tree, rows, session.rng)
            session.commit_tree(tree, found, rows)
            drafter.learn_tree(draft, tree, found)
