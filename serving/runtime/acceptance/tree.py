"""Alternatives, exactly: ranked candidates for one position, and trees of them.

Candidate x is kept with probability p(x) (docs/methods.md, DuoDecoding; the exact rule with one-hot
proposals in turn). Else p(x) is zeroed, p renormalised, and the next candidate tested on what is
left; after the last one a token is sampled from it. Whatever the candidates are, the token follows
p: candidate j is kept with probability (1 − p(x_1) − … − p(x_{j−1})) · p(x_j) / (1 − p(x_1) − … −
p(x_{j−1})) = p(x_j). DuoDecoding's Algorithm 2 never updates p between candidates, which is not
exact.

A tree is walked from the text to the first token none of whose children is kept (SpecInfer,
2305.09781, Algorithm 2): children are proposed deterministically, so that they are tested as
ranked candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from draftwell.serving.runtime.acceptance.exact import one_hot
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.sampling import residual
from draftwell.serving.runtime.trees import ROOT, DraftTree, TreeVerdict
from draftwell.serving.runtime.types import CandidateChoice


class Ranked:
    """The lossless rule for alternatives."""

    lossless: ClassVar[bool] = True

    def choose(
        self, candidates: Sequence[int], row: int, target: Span, rng: Streams
    ) -> CandidateChoice:
        if target.sampling.greedy:
            best = target.top[row]
            kept = candidates.index(best) if best in candidates else None
            return CandidateChoice(kept, best, len(candidates) if kept is None else kept + 1)
        left = target.probs(row)
        for rank, token in enumerate(candidates):
            if rng.test.accepts(float(left[token]), 1.0):
                return CandidateChoice(rank, token, rank + 1)
            left = self.zeroed(left, token)
        return CandidateChoice(None, rng.sample.draw(left), len(candidates))

    def zeroed(self, probs: Tensor, token: int) -> Tensor:
        """`probs` `[vocab]` without a token, renormalised; as they were if rounding rejected a
        token that had all the mass."""
        return residual(probs, one_hot(token, probs))


class ExactTree(Ranked):
    """The lossless rule for trees."""

    def judge(self, tree: DraftTree, target: Span, rng: Streams) -> TreeVerdict:
        """Decide which path of a tree stays.

        Args:
            target: the target's rows: after the text, and after each token of the tree, in the
                tree's order.
        """
        node, path, tested = ROOT, list[int](), 0
        while children := tree.children(node):
            choice = self.choose([tree.tokens[child] for child in children], node + 1, target, rng)
            tested += choice.tested
            if choice.rank is None:
                return TreeVerdict(path, choice.token, True, tested)
            node = children[choice.rank]
            path.append(node)
            if choice.token in target.sampling.stop_token_ids:
                return TreeVerdict(path, None, False, tested)
        return TreeVerdict(path, target.sample(node + 1, rng.sample), False, tested)
