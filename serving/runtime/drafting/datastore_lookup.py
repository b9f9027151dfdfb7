"""Drafts that are looked up in a datastore of the target's texts (REST, He 2023, 2311.08252,
sections 3.1 and 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.continuations import likeliest_chain, likeliest_tree
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.trees import DraftTree


class DatastoreLookup:
    """Proposes the most frequent tokens of a trie of what followed the longest match;
    deterministic.

    Args:
        size: c, tokens of the tree at most.
        levels: tokens of a path at most.
    """

    def __init__(self, datastore: Datastore, size: int, levels: int):
        self.datastore, self.size, self.levels = datastore, size, levels

    def propose(self, session: Session, limit: int) -> Step[DraftTree]:
        levels, tree = min(limit, self.levels), DraftTree()
        if levels > 0:
            found = self.datastore.continuations(session.text.ids, levels)
            tree, _ = likeliest_tree(
                found,
                min(self.size, session.tree_room()),
                levels=levels,
                branches=self.size if session.target.trees else 1,
                stop=session.sampling.stop_token_ids,
            )
        session.stats.drafted += len(tree)
        return tree
        yield  # a generator without a forward pass


def look_up(datastore: Datastore, ids: Sequence[int], limit: int) -> list[int]:
    """At most `limit` tokens: the likeliest after the longest match of the last of `ids`, one by
    one."""
    return likeliest_chain(datastore.continuations(ids, limit), limit)[0] if limit > 0 else []
