"""Drafting with a head on the target's hidden states (EAGLE-3, 2503.01840; its dynamic trees:
EAGLE-2, 2406.16858, section 4).

The head's lane holds pairs of states and tokens: pair i is the target's states at token i with
token i + 1. What the target has read since the last draft is fed first, whatever the head had made
of those places from its own output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import drafted
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.trees import ROOT, DraftTree
from draftwell.serving.runtime.types import Draft, StopPolicy


class HeadPairs:
    """The pairs of one request that rest on the target's own states; a drafter belongs to one
    request, and so does this."""

    def __init__(self) -> None:
        self.known = 0

    def read(self, session: Session, sequence: Sequence[int]) -> Step[Span]:
        """Feed the head all pairs that the target's states allow; the row that predicts the first
        draft token.

        Args:
            sequence: the second tokens of these pairs, which is the text without its first.
        """
        lane, pairs = session.head, len(sequence)
        known = max(self.known, lane.reused)  # at first those that an earlier request left
        # the last pair again where nothing is new: its row is wanted
        lane.rollback(min(known, pairs - 1))
        states = session.target.hidden_states(lane.length, pairs)
        row = yield from lane.read(sequence, features=states)
        self.known = pairs
        return row


class HeadChain:
    """One token after another until the policy, a stop token or the limit ends the draft (a
    `Drafter`).

    Args:
        stop: the stop policy; it belongs to one request.
        with_confidence: also record C of every token.
    """

    def __init__(self, stop: StopPolicy, *, with_confidence: bool = False):
        self.stop, self.with_confidence = stop, with_confidence
        self._pairs = HeadPairs()

    def propose(self, session: Session, limit: int, pending: Draft | None = None) -> Step[Draft]:
        assert not pending, "a head drafts after what the target has read"
        # the draft's tokens are put after it: a text is copied once a draft, not once a step
        sequence = session.text.ids[1:]

        def read(draft: Draft) -> Step[Span]:
            if not len(draft):
                return self._pairs.read(session, sequence)
            sequence.append(draft.tokens[-1])
            last = draft.rows[-1]
            assert last is not None, "a head's draft has a row for each token"
            return session.head.read(sequence, features=last.hidden(0)[None], sure=False)

        return (
            yield from drafted(
                session, self.stop, limit, read, with_confidence=self.with_confidence
            )
        )


class HeadTree:
    """EAGLE-2's dynamic tree: the likeliest paths by the product of the head's probabilities (a
    `TreeDrafter`).

    Level by level the `beam` likeliest nodes are expanded by the head's `beam` likeliest tokens
    each (`Span.contenders`); of all that were found the `nodes` likeliest are proposed, which
    include their ancestors, as no token is likelier than its path. All are chosen by rank, none is
    drawn. For requests whose target reads trees (`Lane.trees`).

    Args:
        depth: levels.
        nodes: tokens of the tree.
    """

    def __init__(self, depth: int, nodes: int, beam: int):
        self.depth, self.nodes, self.beam = depth, nodes, beam
        self._pairs = HeadPairs()

    def propose(self, session: Session, limit: int) -> Step[DraftTree]:
        depth = min(self.depth, limit)
        if depth == 0:
            return DraftTree()
        assert session.target.trees, (
            "the head's rows below the first level know no penalties and no grammar: draft "
            "a `HeadChain`"
        )
        beam, nodes = self.beam, min(self.nodes, session.tree_room())
        row = yield from self._pairs.read(session, session.text.ids[1:])
        found, chances = DraftTree(), list[float]()
        level = self._expand(found, chances, ROOT, 1.0, row, 0, beam)
        states: dict[int, Tensor] = dict.fromkeys(level, row.hidden(0))
        grown: list[int] = []  # nodes that the head reads, ancestors first
        room = session.head.model.max_context - self._pairs.known
        for _ in range(depth - 1):
            level = sorted(
                (i for i in level if found.tokens[i] not in session.sampling.stop_token_ids),
                key=lambda i: -chances[i],
            )
            level = level[: min(beam, room - len(grown))]
            if not level:
                break
            grown += level
            rows = yield from self._read(session, found, grown, states, len(level))
            leaves, level = level, []
            for at, leaf in enumerate(leaves):
                children = self._expand(found, chances, leaf, chances[leaf], rows, at, beam)
                states |= dict.fromkeys(children, rows.hidden(at))
                level += children
        tree = likeliest_part(found, chances, nodes)
        session.stats.drafted += len(tree)
        return tree

    def _expand(
        self,
        found: DraftTree,
        chances: list[float],
        node: int,
        chance: float,
        rows: Span,
        row: int,
        beam: int,
    ) -> list[int]:
        """Add the likeliest tokens after a node; their places."""
        places = []
        for token, prob in rows.contenders(row, beam):
            if prob > 0.0:
                places.append(found.add(token, node))
                chances.append(chance * prob)
        return places

    def _read(
        self,
        session: Session,
        found: DraftTree,
        grown: list[int],
        states: dict[int, Tensor],
        keep: int,
    ) -> Step[Span]:
        """The head's rows after the last `keep` of the nodes `grown`, read as one tree: of its
        earlier levels the slot keeps nothing, since siblings must not see each other."""
        place = {node: i for i, node in enumerate(grown)}
        tree = DraftTree(
            [found.tokens[node] for node in grown],
            [place.get(found.parents[node], ROOT) for node in grown],
        )
        lane = session.head
        lane.rollback(self._pairs.known)
        return (
            yield from lane.read_after(
                tree, features=torch.stack([states[node] for node in grown]), keep=keep
            )
        )


def likeliest_part(found: DraftTree, chances: list[float], count: int) -> DraftTree:
    """The `count` likeliest nodes of a tree, in its order.

    >>> likeliest_part(DraftTree([5, 6, 7, 8], [ROOT, ROOT, 0, 1]), [0.6, 0.3, 0.5, 0.1], 3)
    DraftTree(tokens=[5, 6, 7], parents=[-1, -1, 0], read_along=0)
    """
    kept = sorted(sorted(range(len(found)), key=lambda i: (-chances[i], i))[:count])
    place = {node: i for i, node in enumerate(kept)}
    return DraftTree(
        [found.tokens[i] for i in kept], [place.get(found.parents[i], ROOT) for i in kept]
    )
