"""Acceptance of trees: walk from the text to the first token none of whose children is kept
(SpecInfer, 2305.09781, Algorithm 2).

Children that were proposed deterministically are tested as `Ranked` tests candidates. Children x_1,
x_2 … that were drawn without replacement from q: keep x_1 with probability min(1, p(x_1) / q(x_1));
else p becomes norm(max(0, p − q)), q loses x_1 and is normalised again, and x_2 is tested. Each
step leaves the text's distribution p, since q is then the distribution that x_2 was drawn from. The
token after the last kept one is drawn from what is left of p. At temperature 0 a child is kept if
it is the target's choice.

No strategy here draws its trees yet: those of `eagle3`, `medusa` and `lookahead` are deterministic.
The rule for drawn ones is there for strategies of others, and proved by tests (docs/proofs.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from draftwell.serving.runtime.acceptance.ranked import Ranked
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.sampling import residual
from draftwell.serving.runtime.trees import ROOT, DraftTree, TreeVerdict
from draftwell.serving.runtime.types import CandidateChoice, Rows


class ExactTree:
    """The lossless rule for trees."""

    lossless: ClassVar[bool] = True

    def judge(self, tree: DraftTree, target: Rows, rng: Streams) -> TreeVerdict:
        """Decide which path of a tree stays.

        Args:
            target: the target's rows: after the text, and after each token of the tree, in the
                tree's order.
        """
        node, path, tested = ROOT, list[int](), 0
        while children := tree.children(node):
            choice = self.choose(tree, children, target, node + 1, rng)
            tested += choice.tested
            if choice.rank is None:
                return TreeVerdict(path, choice.token, True, tested)
            node = children[choice.rank]
            path.append(node)
            if choice.token in target.sampling.stop_token_ids:
                return TreeVerdict(path, None, False, tested)
        return TreeVerdict(path, target.sample(node + 1, rng.sample), False, tested)

    def choose(
        self, tree: DraftTree, children: Sequence[int], target: Rows, row: int, rng: Streams
    ) -> CandidateChoice:
        """Keep at most one of the siblings `children` against a row of the target."""
        tokens = [tree.tokens[child] for child in children]
        if target.sampling.greedy or not tree.rows:
            return Ranked().choose(tokens, row, target, rng)
        left = target.probs(row)
        drawn = tree.rows[children[0]].probs(0).to(left.device)
        for rank, token in enumerate(tokens):
            if rng.test.accepts(float(left[token]), float(drawn[token])):
                return CandidateChoice(rank, token, rank + 1)
            left = residual(left, drawn)
            drawn = Ranked().zeroed(drawn, token)
        return CandidateChoice(None, rng.sample.draw(left), len(tokens))
