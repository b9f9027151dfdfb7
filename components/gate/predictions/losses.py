"""How well an artifact predicts the target's verdicts, prompt by prompt, compared with another one
on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SMALLEST = 1e-6
"""Predictions are clipped to this: a single surprise would outweigh everything else."""


@dataclass(frozen=True)
class PredictiveLoss:
    """How well an artifact predicts the target's verdicts on some traces, prompt by prompt.

    Args:
        losses: log loss of the candidate's, nats, summed over each prompt's tokens.
        reference: that of what it is compared with, on the same tokens.
        tokens: how many each prompt has.
        against: what it is compared with, as text.
        favours_champion: the champion's has learnt from some of the prompts and the candidate's has
            not.
    """

    kind: str
    losses: tuple[float, ...]
    reference: tuple[float, ...]
    tokens: tuple[int, ...]
    against: str
    favours_champion: bool = False


def log_loss(probabilities: np.ndarray, targets: np.ndarray) -> float:
    """Sum of the cross-entropy of probabilities and targets in [0, 1]: of −ln of the probability
    that was given to what came, above 0.

    >>> round(log_loss(np.array([0.5, 0.5]), np.array([True, False])), 4)
    1.3863
    """
    given, target = (
        np.clip(probabilities.astype(np.float64), SMALLEST, 1 - SMALLEST),
        targets.astype(np.float64),
    )
    return float(-(target * np.log(given) + (1 - target) * np.log(1 - given)).sum())
