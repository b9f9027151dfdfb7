"""How many judged tokens the prior of an acceptance table counts for, estimated from the trace that
the table is counted on.

Tokens of one prompt are alike, and so are prompts of one task: a translation is hard, and its
counts with it, at any confidence of the draft. So N counted tokens say far less about other prompts
than N independent ones would, and a prior of a few tokens drowns in them.

The weight is chosen by what a table is for, predicting prompts that it has not counted: every task
is left out once, and its tokens are predicted by the counts of all other tasks (leave-one-group-out
cross-validation; Hastie, Tibshirani and Friedman, The Elements of Statistical Learning, 7.10). Of
the weights whose log loss exceeds the least one by no more than a standard error over tasks the
largest is taken (the one-standard-error rule, ibid.), because few tasks that agree by chance make
counts look more certain than they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftwell.serving.artifacts.acceptance_table import EDGES, MIDPOINTS, PRIOR_WEIGHT

WEIGHTS = (PRIOR_WEIGHT, 18, 32, 56, 100, 178, 316, 562, 1000)
"""What is tried, four in a decade. The largest leaves what the draft says nearly as it is; a
server's traffic, which no sample stands for, outweighs it within a thousand tokens of a bin."""
FEWEST_GROUPS = 5
"""With fewer groups their spread is not known, and the largest weight is taken."""


@dataclass(frozen=True)
class PriorWeight:
    """A weight, and what it was estimated from.

    Args:
        tokens: one of `WEIGHTS`.
        basis: such as "12 tasks left out in turn".
    """

    tokens: int
    basis: str


def estimate_prior_weight(
    tasks: np.ndarray, prompts: np.ndarray, confidence: np.ndarray, accepted: np.ndarray
) -> PriorWeight:
    """The prior weight of the table of some judged tokens.

    Where no prompt names a task, single prompts are left out.

    Args:
        tasks, prompts: `[n]` task, or None, and id of each token's prompt. Prompts of the same text
            must have the same id.
        confidence, accepted: `[n]` float64, C and how likely each token was to be kept, 0..1.
    """
    named = np.array([task is not None for task in tasks])
    what = "tasks" if named.any() else "prompts"
    # A prompt without a task beside others with one is a group of its own.
    names = [
        f"task {task}" if known else f"prompt {prompt}"
        for task, prompt, known in zip(tasks, prompts, named, strict=True)
    ]
    groups = np.unique(names, return_inverse=True)[1]
    count = int(groups.max()) + 1
    if count < FEWEST_GROUPS:
        return PriorWeight(WEIGHTS[-1], f"too few {what} ({count}): the largest")
    losses = left_out_losses(groups, confidence, accepted)
    best = int(losses.sum(0).argmin())
    excess = losses - losses[:, best : best + 1]
    slack = np.sqrt(count) * excess.std(0, ddof=1)  # standard error of the sum over groups
    return PriorWeight(
        WEIGHTS[int(np.flatnonzero(excess.sum(0) <= slack)[-1])], f"{count} {what} left out in turn"
    )


def left_out_losses(groups: np.ndarray, confidence: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """`[groups, weights]` log loss of each group's tokens under the counts of all others, nats, for
    each of `WEIGHTS`.

    Args:
        groups: `[n]` index of each token's group.
    """
    bins = np.searchsorted(np.array(EDGES), confidence, side="right")  # as `AcceptanceTable.bin_of`
    total, kept = (np.zeros((int(groups.max()) + 1, len(EDGES) + 1)) for _ in range(2))
    np.add.at(total, (groups, bins), 1.0)
    np.add.at(kept, (groups, bins), accepted)
    weights = np.array(WEIGHTS, dtype=float)[:, None, None]
    # [weights, groups, bins]
    alpha = ((kept.sum(0) - kept) + weights * np.array(MIDPOINTS)) / (
        (total.sum(0) - total) + weights
    )
    found: np.ndarray = -(kept * np.log(alpha) + (total - kept) * np.log1p(-alpha)).sum(-1).T
    return found
