"""Alternatives, exactly: ranked candidates for one position, and trees of them.

Candidate x is kept with probability p(x) (docs/methods.md; the exact rule with one-hot
proposals in turn). Else p(x) is taken out, and the next candidate is tested against the mass that
is left, as though p were renormalised; after the last one a token is sampled from the rest.
Whatever the candidates are, the token follows p: candidate j is kept with probability (1 − p(x_1) −
… − p(x_{j−1})) · p(x_j) / (1 − p(x_1) − … − p(x_{j−1})) = p(x_j). DuoDecoding's Algorithm 2 never
updates p between candidates, which is not exact.

A tree is walked from the text to the first token none of whose children is kept (SpecInfer,
2305.09781, Algorithm 2): children are proposed deterministically, so that they are tested as
ranked candidates.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.trees import ROOT, DraftTree, TreeVerdict
from draftwell.serving.runtime.types import CandidateChoice


class Ranked:
    """The lossless rule for alternatives."""

    lossless: ClassVar[bool] = True

    def choose(
        self, candidates: Sequence[int], row: int, target: Span, rng: Streams
    ) -> Step[CandidateChoice]:
        if target.sampling.has_choice:
            best = (yield from target.draw(row, rng.sample)).token
            kept = candidates.index(best) if best in candidates else None
            return CandidateChoice(kept, best, len(candidates) if kept is None else kept + 1)
        chances = yield from target.chances(row, candidates)
        left = 1.0
        for rank, (token, chance) in enumerate(zip(candidates, chances, strict=True)):
            if rng.test.accepts(chance, left):
                return CandidateChoice(rank, token, rank + 1)
            left = self.without(left, chance)
        drawn = yield from target.draw(row, rng.sample, without=candidates)
        return CandidateChoice(None, drawn.token, len(candidates))

    def without(self, left: float, chance: float) -> float:
        """The mass of p that is left without a candidate; above 0, so that what has no mass is
        never kept."""
        return max(sys.float_info.min, left - chance)


class ExactTree(Ranked):
    """The lossless rule for trees."""

    def judge(self, tree: DraftTree, target: Span, rng: Streams) -> Step[TreeVerdict]:
        """Decide which path of a tree stays.

        Args:
            target: the target's rows: after the text, and after each token of the tree, in the
                tree's order.
        """
        node, path, tested = ROOT, list[int](), 0
        rows = [parent + 1 for parent in tree.parents[: tree.judged]]
        yield from target.fetch_chances(rows, tree.tokens[: tree.judged])
        while children := tree.children(node):
            candidates = [tree.tokens[child] for child in children]
            choice = yield from self.choose(candidates, node + 1, target, rng)
            tested += choice.tested
            if choice.rank is None:
                return TreeVerdict(path, choice.token, True, tested)
            node = children[choice.rank]
            path.append(node)
            if choice.token in target.sampling.stop_token_ids:
                return TreeVerdict(path, None, False, tested)
        drawn = yield from target.draw(node + 1, rng.sample)
        return TreeVerdict(path, drawn.token, False, tested)
