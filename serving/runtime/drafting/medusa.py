"""Medusa's candidates: the likeliest tokens of each head, as a sparse tree of fixed shape (Cai
2024, 2401.10774, sections 2.1 and 2.3)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwell.serving.artifacts.medusa_heads import MedusaHeads
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.trees import ROOT, DraftTree

SHAPE: tuple[tuple[int, ...], ...] = (
    (0,),
    (0, 0),
    (1,),
    (0, 0, 0),
    (2,),
    (0, 1),
    (1, 0),
    (0, 0, 1),
    (0, 1, 0),
    (1, 0, 0),
    (0, 2),
    (2, 0),
    (3,),
    (1, 1),
    (0, 0, 0, 0),
    (0, 0, 2),
)
"""The tree's nodes, the most useful first: of each the ranks of the tokens on its path. A guess for
heads whose first token is right in about two thirds, half and a third of all cases; the authors
choose theirs by such accuracies."""


class Medusa:
    """A `TreeDrafter` over the target's last hidden state; one object serves one request.

    Args:
        embedding: `[n, hidden]` rows of the target's output embedding for the heads' tokens.
        nodes: tokens of the tree at most.
    """

    def __init__(self, heads: MedusaHeads, embedding: Tensor, nodes: int):
        self.heads, self.embedding, self.nodes = heads, embedding, nodes
        self._state: Tensor | None = None

    def propose(self, session: Session, limit: int) -> Step[DraftTree]:
        tree, places = DraftTree(), dict[tuple[int, ...], int]({(): ROOT})
        depth, room = min(limit, len(self.heads)), min(self.nodes, session.tree_room())
        ranked = self._ranked(depth) if depth else []
        for path in SHAPE:
            parent = places.get(path[:-1])
            alternative = any(path) and not session.target.trees
            if (
                len(tree) == room
                or parent is None
                or len(path) > depth
                or path[-1] >= len(ranked[0])
                or alternative
            ):
                continue
            if parent == ROOT or tree.tokens[parent] not in session.sampling.stop_token_ids:
                places[path] = tree.add(ranked[len(path) - 1][path[-1]], parent)
        session.stats.drafted += len(tree)
        return tree
        yield  # a generator without a forward pass

    def follow(self, tree: DraftTree, path: Sequence[int], rows: Span) -> None:
        """Keep the state that the text's last token was drawn from: the heads say what comes after
        that token."""
        self._state = rows.hidden(path[-1] + 1 if path else 0)

    def _ranked(self, depth: int) -> list[list[int]]:
        """Of each head the likeliest tokens, best first."""
        assert self._state is not None, "propose comes after follow"
        states = self.heads.states(self._state)[:depth].to(self.embedding)
        most = 1 + max(max(path) for path in SHAPE)
        best = (states @ self.embedding.T).topk(min(most, len(self.embedding))).indices
        found: list[list[int]] = self.heads.tokens[best.cpu()].tolist()
        return found
