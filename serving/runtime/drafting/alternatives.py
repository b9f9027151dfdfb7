"""Alternatives to a head's draft (ours): the tokens that the head ranked second and third are
verified beside its chain, where a row of the target's pass costs less than they are expected to
bring.

A pass over a few more tokens takes hardly longer, and the head has ranked them already. An
alternative that is the target's choice is kept where the chain is rejected, and the target's row
after it gives one token more than a rejection would. Nothing follows an alternative. For requests
with a choice, greedy or coupled: others draw their chain, whose law their rule needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.runtime.drafting.expected_gain import RoundCosts
from draftwell.serving.runtime.trees import ROOT, DraftTree, TreeVerdict
from draftwell.serving.runtime.types import Draft, Verdict


@dataclass
class Alternatives:
    """What one request verifies beside its head's drafts.

    Args:
        costs: of a round.
        chain: a draft token's confidence → how often it was kept, shared.
        table: an alternative's probability → how often it was the target's choice, shared; counted
            here.
        most: alternatives to one token of the draft, at most.
    """

    costs: RoundCosts
    chain: AcceptanceTable
    table: AcceptanceTable
    most: int = 2
    ranked: list[list[tuple[int, float]]] = field(default_factory=list)
    """Of each token of the last draft the alternatives, each with its probability."""

    def around(self, draft: Draft, room: int) -> DraftTree:
        """A draft as a tree: its tokens first, then the alternatives that pay, the best
        first.

        Args:
            draft: with the rows and confidences that its tokens are from.
            room: tokens of the tree at most.
        """
        tree = DraftTree(list(draft.tokens), list(range(ROOT, len(draft) - 1)))
        self.ranked = []
        found: list[tuple[float, int, int]] = []
        reached = 1.0
        for place, token in enumerate(draft.tokens):
            row = draft.row(place)
            assert row is not None, "a head's draft has a row for each token"
            others = [
                (other, prob)
                for other, prob in row.contenders(0, 1 + self.most)
                if other != token and prob > 0.0
            ]
            self.ranked.append(others)
            found += [
                (reached * self.table.alpha(prob), place - 1, other) for other, prob in others
            ]
            reached *= self.chain.alpha(draft.confidence[place])
        for chance, parent, token in sorted(found, reverse=True):
            if len(tree) >= room or chance <= self.costs.lengthening(len(tree), 1):
                break
            tree.add(token, parent)
        return tree

    def learn(self, draft: Draft, tree: DraftTree, verdict: TreeVerdict) -> Verdict:
        """Count what became of a tree's alternatives; the verdict on the chain alone."""
        kept = sum(place < len(draft) for place in verdict.path)
        chosen = draft.tokens[:kept]
        if kept < len(draft) and (
            beside := [place for place in verdict.path if place >= len(draft)]
        ):
            chosen = [*chosen, tree.tokens[beside[0]]]
        elif verdict.rejected and verdict.token is not None:
            chosen = [*chosen, verdict.token]
        self.count(chosen)
        return Verdict(kept, verdict.token, len(chosen))

    def count(self, chosen: Sequence[int]) -> None:
        """Count the alternatives of the last draft, those that were not verified too: else those
        that once did not pay never would again.

        Args:
            chosen: the target's choices at the places that were judged.
        """
        for token, others in zip(chosen, self.ranked, strict=False):
            for other, prob in others:
                self.table.update(prob, kept=other == token)
        self.ranked = []
