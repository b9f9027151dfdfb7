"""Serial schedule with trees: draft a tree, verify it in one forward pass, keep one path
(SpecInfer, 2305.09781, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.protocols import TreeDrafter, TreeRule
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.trees import DraftTree
from draftwell.serving.runtime.types import Rows


def serial_trees(
    session: Session,
    drafter: TreeDrafter,
    rule: TreeRule,
    follow: Callable[[DraftTree, list[int], Rows], None] | None = None,
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
        verdict = rule.judge(tree, rows, session.rng)
        session.commit_tree(tree, verdict, rows)
        if follow:
            follow(tree, verdict.path, rows)
