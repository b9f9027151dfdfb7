"""Serial schedule with trees: draft a tree, verify it in one forward pass, keep one path (SpecInfer, 2305.09781, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

from serving.runtime.commands import Step
from serving.runtime.protocols import TreeDrafter, TreeRule
from serving.runtime.session.session import Session
from serving.runtime.trees import DraftTree, TreeVerdict


def serial_trees(session: Session, drafter: TreeDrafter, rule: TreeRule,
                 learn: Callable[[DraftTree, TreeVerdict], None] | None = None) -> Step[None]:
    """Run a request to its end.

    Args:
        learn: called between verifications with what was judged; the only place where online state may change.
    """
    yield from session.prefill()
    while not session.text.finished:
        tree = yield from drafter.propose(session, session.draft_room(1))
        rows = yield from session.verify_tree(tree)
        verdict = rule.judge(tree, rows, session.rng)
        session.commit_tree(tree, verdict, rows)
        if learn:
            learn(tree, verdict)
