"""The rule by which a value measured here is compared with a paper's."""

from __future__ import annotations

from enum import StrEnum

from draftwell.components.papers.estimates import Estimate

CLOSE = 0.15
"""Relative difference up to which a value counts as the paper's."""
WIDEST = 0.5
"""Width of an interval, over its value, from which it decides nothing if it holds "no effect" or
the paper's value."""
NO_EFFECT = 0.05
"""A paper's value this near to "no effect", relatively, claims none; ours must then be as near to
the paper's."""
SMALLEST, LARGEST = 0.5, 2.0
"""Shares of the paper's effect, which is what its value is beyond "no effect", between which ours
must lie to count as the paper's."""
UNIT = 0.2
"""What these shares are taken of where "no effect" is 0: of a difference near 0 a share would be
nothing."""
PARITY = 0.03
"""Points of first choices (of 1) that a lossy method may lose and still count as no worse."""
NATS = 0.05
"""Nats a token by which a lossy method's text may be less likely under the target than plain
decoding's, and still count as no worse: 5 % of perplexity."""
FEW, ENOUGH = 30, 100
"""Prompts below which a value deserves little trust, and from which it deserves much."""


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    DIRECTION = "direction only"
    UNDECIDED = "undecided"
    NOT_REPRODUCED = "not reproduced"
    TOO_FEW = "too few prompts"
    NOT_COMPARABLE = "not comparable"
    NO_VALUE = "no value in the paper"
    OPEN = "open"
    KEPT = "quality kept"
    LOST = "quality lost"
    UNKNOWN = "quality undecided"


def verdict(
    paper: float | None,
    ours: Estimate,
    neutral: float | None = 1.0,
    *,
    comparable: bool = True,
    flattered: bool = False,
) -> Verdict:
    """Compare.

    Args:
        paper: its value; None where it has none.
        neutral: as in `tables.Row`.
        comparable, flattered: as in `tables.Row`.

    >>> [
    ...     str(verdict(1.4, Estimate(*ours)))
    ...     for ours in ((1.3, 1.2, 1.35), (1.1, 1.05, 1.2), (1.1, 0.9, 1.2), (1.4, 0.9, 1.9))
    ... ]
    ['reproduced', 'direction only', 'not reproduced', 'too few prompts']
    >>> [str(verdict(1.12, Estimate(*ours))) for ours in ((1.02, 0.99, 1.05), (1.05, 0.95, 1.15))]
    ['not reproduced', 'undecided']
    """
    if paper is None:
        return Verdict.NO_VALUE
    if not comparable:
        return Verdict.NOT_COMPARABLE
    found = compared(paper, ours, neutral)
    short = found == Verdict.NOT_REPRODUCED and ours.value < paper
    return Verdict.NOT_COMPARABLE if flattered and not short else found


def quality(lost: Estimate, margin: float = PARITY) -> Verdict:
    """Of the share of first choices, or another measure, less plain decoding's.

    >>> [
    ...     str(quality(Estimate(-0.02, *ends)))
    ...     for ends in ((-0.025, 0.01), (-0.1, -0.01), (-0.1, 0.01))
    ... ]
    ['quality kept', 'quality lost', 'quality undecided']
    """
    if lost.low >= -margin:
        return Verdict.KEPT
    return Verdict.LOST if lost.high < 0 else Verdict.UNKNOWN


def trust(prompts: int) -> str:
    """How much of it a value of so many prompts deserves."""
    return "low" if prompts < FEW else "medium" if prompts < ENOUGH else "high"


def compared(paper: float, ours: Estimate, neutral: float | None) -> Verdict:
    """The verdict on a value that is measured as the paper's is; arguments as in `verdict`."""
    holds = ours.low <= paper <= ours.high
    open_side = neutral is not None and ours.low <= neutral <= ours.high
    if ours.high - ours.low > WIDEST * unit(ours.value, neutral) and (holds or open_side):
        return Verdict.TOO_FEW
    close = near(ours.value, paper, CLOSE * unit(paper, neutral))
    if neutral is None:
        return without_side(close, holds)
    if has_no_side(paper, neutral):
        ends_are_close = all(
            near(end, paper, CLOSE * unit(paper, neutral)) for end in (ours.low, ours.high)
        )
        return without_side(
            near(ours.value, paper, NO_EFFECT * unit(paper, neutral)) and ends_are_close, holds
        )
    if not (ours.low > neutral if paper > neutral else ours.high < neutral):
        return Verdict.UNDECIDED if holds and open_side else Verdict.NOT_REPRODUCED
    alike = SMALLEST - 1e-9 <= (ours.value - neutral) / (paper - neutral) <= LARGEST + 1e-9
    return Verdict.REPRODUCED if close and alike else Verdict.DIRECTION


def has_no_side(paper: float, neutral: float) -> bool:
    """Whether a paper's value is so near to "no effect" that it claims none.

    >>> has_no_side(1.04, 1.0), has_no_side(1.06, 1.0)
    (True, False)
    """
    return near(paper, neutral, NO_EFFECT * unit(neutral, neutral))


def without_side(same: bool, holds: bool) -> Verdict:
    """The verdict on a value that has no direction.

    Args:
        same: whether ours is the paper's, as far as the rule asks.
        holds: whether our interval holds the paper's.
    """
    return Verdict.REPRODUCED if same else Verdict.UNDECIDED if holds else Verdict.NOT_REPRODUCED


def unit(value: float, neutral: float | None) -> float:
    """What a share is taken of: a value, but `UNIT` for differences.

    >>> unit(1.4, 1.0), unit(0.01, 0.0)
    (1.4, 0.2)
    """
    return UNIT if neutral == 0 else abs(value)


def near(value: float, reference: float, tolerance: float) -> bool:
    """Whether a value differs from a reference by no more than a tolerance, the last bit aside.

    >>> near(1.05, 1.0, 0.05), near(1.06, 1.0, 0.05)
    (True, False)
    """
    return abs(value - reference) <= tolerance + 1e-9
