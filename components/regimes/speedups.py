"""Expected speed-up of each method over plain decoding, from a draft's cost and its acceptance.

Each method has its best lengths, as a tuner would find them. Times are in target passes over one
token, so that plain decoding writes one token in each unit of time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from draftwell.components.formulas import (
    best_gamma,
    expected_tokens,
    sd_speedup,
    token_acceptance,
)
from draftwell.serving.artifacts.forward_costs import in_one_pass, seconds_at, seconds_table

LONGEST = 32
"""Of serial drafts, of SPIDE's continuations and of PEARL's drafts, as in the strategies."""
LONGEST_SEQUENCE = 64
"""Of DuoDecoding's, likewise."""
FLAT: Mapping[int, float] = {1: 1.0}
"""A target pass over several tokens takes as long as one over a single token."""


class Placement(StrEnum):
    """Where the draft computes."""

    IN_TURN = "one device in turn"
    OWN = "a device of its own for the draft"


class Pair(NamedTuple):
    """A draft and its target.

    Args:
        c: seconds of a draft pass over those of a target pass, both over one token.
        alpha: chance that a draft token is kept, below 1.
        verify: tokens → seconds of a target pass over them, over those of one token.
    """

    c: float
    alpha: float
    verify: Mapping[int, float] = FLAT


def sd(pair: Pair, placement: Placement = Placement.IN_TURN) -> float:
    """Speculative decoding at its fastest draft length (Leviathan 2023, Theorem 3.8). Its models
    take turns wherever they are.

    >>> round(sd(Pair(c=0.05, alpha=0.8)), 2)
    3.09
    """
    gamma = best_gamma(pair.alpha, pair.c, pair.verify)
    return sd_speedup(pair.alpha, gamma, 1.0, pair.c, pair.verify)


def overlapped(
    pair: Pair,
    serial: np.ndarray | int,
    steps: np.ndarray | int,
    placement: Placement,
) -> np.ndarray:
    """Speed-up of SPIDE's Algorithm 1, and of PEARL with no serial draft; as arrays, all lengths
    at once.

    A cycle ends with a rejection, so it writes 1 / (1 − α) tokens. It begins with `serial` drafts.
    The target then judges these and the continuation's first token while `steps` tokens are
    drafted; if all are kept, it judges `steps` tokens each time. On a device of its own the draft
    makes them meanwhile; on one device the two passes take their sum.

    Args:
        serial: draft tokens before the first verification, at least 0.
        steps: draft tokens during each verification, at least 1.
    """
    serial, steps = np.asarray(serial), np.asarray(steps)
    most = max(int(serial.max()) + 1, int(steps.max()))
    seconds, drafting = np.array(seconds_table(pair.verify, most)), steps * pair.c

    def both(verifying: np.ndarray) -> np.ndarray:
        if placement is Placement.OWN:
            return np.maximum(verifying, drafting)
        return verifying + drafting

    rounds = pair.alpha ** (serial + 1) / (1 - pair.alpha**steps)
    cycle = serial * pair.c + both(seconds[serial + 1]) + rounds * both(seconds[steps])
    speeds: np.ndarray = 1 / ((1 - pair.alpha) * cycle)
    return speeds


def spide(pair: Pair, placement: Placement) -> float:
    """SPIDE at its fastest threshold, which with tokens of one chance is a serial length. Its
    continuation is at most Eq. 6's s and what the target verifies in about one pass.

    >>> round(spide(Pair(c=0.145, alpha=0.8), Placement.OWN), 2)
    2.52
    """
    serial = np.arange(1, LONGEST + 1)[:, None]
    most = min(in_one_pass(pair.verify, LONGEST), max(1, int(pair.verify[1] / pair.c)))
    return float(overlapped(pair, serial, np.arange(1, most + 1), placement).max())


def pearl(pair: Pair, placement: Placement, longest: int = LONGEST) -> float:
    """PEARL at its fastest draft length, no longer than the target verifies in about one pass.

    >>> round(pearl(Pair(c=0.145, alpha=0.8), Placement.OWN), 2)
    2.45
    """
    steps = np.arange(1, in_one_pass(pair.verify, longest) + 1)
    return float(overlapped(pair, 0, steps, placement).max())


def duo_decoding(pair: Pair, placement: Placement) -> float:
    """DuoDecoding with one sequence, whose rounds are PEARL's: each judges what the last one left
    and the first new token. What further sequences add depends on more than α."""
    return pearl(pair, placement, LONGEST_SEQUENCE)


class Verifier(NamedTuple):
    """SPRINTER's rates.

    Args:
        true_positive, false_positive: chances that it accepts an acceptable and an unacceptable
            token, below 1.
    """

    true_positive: float
    false_positive: float


ROC_90 = Verifier(0.9, 0.3)
"""On the ROC curve of two normal distributions whose area is .9, that of SPRINTER's Figure 3."""


def sprinter(
    pair: Pair, placement: Placement = Placement.IN_TURN, verifier: Verifier = ROC_90
) -> float:
    """SPRINTER by Theorem 3.3, with runs of acceptable tokens that end with chance 1 − α: the
    target is called once for a run's tokens and the one that the verifier flags. Lossy: of the
    unacceptable tokens a share of `false_positive` stays.

    >>> round(sprinter(Pair(c=0.05, alpha=0.8), verifier=Verifier(1 - 1e-9, 0.0)), 2)
    4.0
    """
    kept, wrong = verifier
    whole = (1 - pair.alpha) / (1 - pair.alpha * kept)  # chance that it errs nowhere in the run
    tokens = (kept - whole) / (1 - kept) + whole / (1 - wrong) + 1
    seconds = seconds_table(pair.verify, math.ceil(tokens))
    return tokens / (tokens * pair.c + float(np.interp(tokens, range(len(seconds)), seconds)))


def rescued(kept: float, kept_with: float, gamma: int) -> float:
    """Share of the rejections that CSD takes back.

    Args:
        kept, kept_with: shares of the drafted tokens that SD and CSD keep.
        gamma: draft length of both.

    >>> round(rescued(0.636, 0.796, 6), 2)
    0.49
    """
    plain, calibrated = (token_acceptance(share * gamma, gamma) for share in (kept, kept_with))
    return (calibrated - plain) / (1 - plain)


RESCUED = (rescued(0.597, 0.679, 6), rescued(0.636, 0.796, 6))
"""CSD's Table 3, HumanEval and MATH500, at γ 6 (section 5.1)."""


KEPT_BY_ASD = 0.12
"""Share of the rejections that ASD takes back at g 0.1, counted: a near copy of 27 layers (α 0.69),
γ 6, where 97.1 % of the tokens are the target's first choice; 95.8 % by lossy SD at τ 0.6."""


def csd(pair: Pair, placement: Placement = Placement.IN_TURN, share: float = RESCUED[0]) -> float:
    """CSD as SD that keeps a share of what would be rejected, its rule free of cost (the paper
    reports .01 to .02 %). Lossy.

    Args:
        share: of the rejections; by default the smaller of the paper's two.
    """
    return sd(pair._replace(alpha=pair.alpha + (1 - pair.alpha) * share))


class Qualifier(NamedTuple):
    """PyramidSD's middle model.

    Args:
        c: seconds of its pass over those of a target pass.
        accepts: chance that it keeps a draft token.
        accepted: chance that the target keeps a token of its text.
    """

    c: float
    accepts: float
    accepted: float


def pyramid_sd(pair: Pair, qualifier: Qualifier) -> float:
    """PyramidSD at its fastest lengths (section 3.3, whose β(l + 1) is `expected_tokens`). Lossy.
    It depends on a third model, so that it has no place on a plane of c and α.

    >>> round(pyramid_sd(Pair(c=0.15, alpha=0.6), Qualifier(0.4, 0.8, 0.95)), 2)
    2.24
    """
    lengths = range(1, LONGEST + 1)
    drafted = max(  # tokens per unit of time that draft and qualifier write together
        expected_tokens(qualifier.accepts, length) / (length * pair.c + qualifier.c)
        for length in lengths
    )
    return max(
        expected_tokens(qualifier.accepted, length)
        / (length / drafted + seconds_at(pair.verify, length + 1))
        for length in lengths
    )


def plain(pair: Pair, placement: Placement = Placement.IN_TURN) -> float:
    """Plain decoding."""
    return 1.0


Method = Callable[[Pair, Placement], float]
METHODS: dict[str, Method] = {
    "plain decoding": plain,
    "SD": sd,
    "SPIDE": spide,
    "PEARL": pearl,
    "DuoDecoding": duo_decoding,
    "CSD": csd,
    "SPRINTER": sprinter,
}
LOSSLESS = ("plain decoding", "SD", "SPIDE", "PEARL", "DuoDecoding")
"""Their texts are plain decoding's."""


def fastest(pair: Pair, placement: Placement) -> str:
    """The fastest lossless method, of equally fast ones the simplest."""
    return max(LOSSLESS, key=lambda name: round(METHODS[name](pair, placement), 9))
