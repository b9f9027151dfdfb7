"""Serial schedules: draft, verify, draft, verify.

Drafts are chains (Leviathan 2023, Algorithm 1), trees of which one path is kept (SpecInfer,
2305.09781, Algorithm 1), or chains with tokens beside them that are verified in the same pass
(ours).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.protocols import AcceptanceRule, Drafter, TreeDrafter, TreeRule
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.trees import DraftTree, TreeVerdict
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
        verdict = yield from rule.judge(draft, rows, session.rng)
        session.commit(draft, verdict, rows)
        if learn:
            learn(draft, verdict)


def serial_trees(
    session: Session,
    drafter: TreeDrafter,
    rule: TreeRule,
    follow: Callable[[DraftTree, list[int], Span], None] | None = None,
) -> Step[None]:
    """Run a request to its end.

    Args:
        follow: called after the prompt and after each verification, for a drafter that reads the
            target's rows: with the tree, the path that was kept, and the rows after the text and
            after each token of the tree. After the prompt the tree is empty.
    """
    rows = yield from session.prefill()
    if follow:
        follow(DraftTree(), [], rows)
    while not session.text.finished:
        if (yield from session.follow_prediction(follow)):
            continue
        tree = yield from drafter.propose(session, session.draft_room(1))
        rows = yield from session.verify_tree(tree)
        verdict = yield from rule.judge(tree, rows, session.rng)
        session.commit_tree(tree, verdict, rows)
        if follow:
            follow(tree, verdict.path, rows)


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
            verdict = yield from rule.judge(draft, rows, session.rng)
            session.commit(draft, verdict, rows)
            drafter.learn(draft, verdict)
        else:
            rows = yield from session.verify_tree(tree)
            found = yield from tree_rule.judge(tree, rows, session.rng)
            session.commit_tree(tree, found, rows)
            drafter.learn_tree(draft, tree, found)
