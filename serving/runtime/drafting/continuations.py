"""What followed a match, as a draft: a counted trie of which the likeliest tokens are taken.

SuffixDecoding (2411.04975, section 4.1) and REST (2311.08252, section 3.2) both weigh a token by
how many of the continuations begin with its path. The path's probability, that share, only falls
along a path, so taking the largest one again and again finds the best tree.
"""

from __future__ import annotations

from collections.abc import Set
from heapq import heappop, heappush

from draftwell.serving.artifacts.datastore import Continuations
from draftwell.serving.runtime.trees import ROOT, DraftTree


def likeliest_tree(
    found: Continuations,
    size: int,
    *,
    levels: int,
    branches: int,
    least: float = 0.0,
    stop: Set[int] = frozenset(),
) -> tuple[DraftTree, float]:
    """The likeliest tokens, and the sum of their paths' probabilities: how many of them the target
    is expected to keep.

    Args:
        size, levels: tokens, and tokens of a path, at most; 0 or less gives none.
        branches: alternatives at one place at most; 1 gives a chain.
        least: tokens whose path has a smaller probability are left out.
        stop: tokens after which nothing follows.

    >>> tree, score = likeliest_tree(
    ...     Continuations(2, [[5, 6], [5, 7], [8]]), 3, levels=2, branches=2
    ... )
    >>> tree.tokens, tree.parents, round(score, 2)
    ([5, 8, 6], [-1, -1, 0], 1.33)
    """
    tree, score, total = DraftTree(), 0.0, len(found.tokens)
    # −count, order of arrival, parent, depth, continuations
    waiting: list[tuple[int, int, int, int, list[list[int]]]] = []
    arrived = 0

    def offer(group: list[list[int]], parent: int, depth: int) -> None:
        nonlocal arrived
        following: dict[int, list[list[int]]] = {}
        for tokens in group:
            if len(tokens) > depth:
                following.setdefault(tokens[depth], []).append(tokens)
        # ties: what was found first
        for kept in sorted(following.values(), key=len, reverse=True)[:branches]:
            if len(kept) >= least * total:
                heappush(waiting, (-len(kept), arrived, parent, depth, kept))
                arrived += 1

    if levels > 0:
        offer(found.tokens, ROOT, 0)
    while waiting and len(tree) < size:
        count, _, parent, depth, kept = heappop(waiting)
        token = kept[0][depth]
        place = tree.add(token, parent)
        score -= count / total
        if depth + 1 < levels and token not in stop:
            offer(kept, place, depth + 1)
    return tree, score


def likeliest_chain(found: Continuations, limit: int) -> tuple[list[int], list[float]]:
    """The likeliest token after each other, and of each the share of the continuations up to it
    that continue with it.

    >>> likeliest_chain(Continuations(2, [[5, 6], [5, 7], [5, 6], [8]]), 3)
    ([5, 6], [0.75, 0.6666666666666666])
    """
    tokens, shares, group = list[int](), list[float](), found.tokens
    while len(tokens) < limit:
        following: dict[int, list[list[int]]] = {}
        for one in group:
            if len(one) > len(tokens):
                following.setdefault(one[len(tokens)], []).append(one)
        if not following:
            break
        # ties: what was found first
        token, kept = max(following.items(), key=lambda item: len(item[1]))
        tokens.append(token)
        shares.append(len(kept) / len(group))
        group = kept
    return tokens, shares
