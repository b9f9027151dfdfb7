"""The rule by which a value measured here is compared with a paper's."""

from __future__ import annotations

from enum import StrEnum

from components.papers.estimates import Estimate

CLOSE = 0.15
"""Relative difference up to which a value counts as the paper's."""
WIDEST = 0.5
"""Width of an interval, over its value, from which it decides nothing."""
NO_EFFECT = 0.05
"""A paper's value this near to "no effect", relatively, claims none; ours must then be as near to the paper's."""
RULE = ("**reproduced**: our whole interval is on the paper's side of \"no effect\", and "
        f"our value is within {CLOSE:.0%} of the paper's or the paper's value is inside our interval; "
        "**direction only**: the first of these alone; **not reproduced**: neither. "
        f"An interval wider than {WIDEST:.0%} of our value decides nothing (**too few prompts**). "
        f"A paper's value within {NO_EFFECT:.0%} of \"no effect\" has no side: ours is reproduced within {NO_EFFECT:.0%} of it, or where "
        "it is inside our interval; a value that has no \"no effect\", such as an acceptance rate, has no side either.")
OTHERS = ("**no value in the paper**: ours only. **not comparable**: measured otherwise than in the paper, as the table says. "
          "**not testable here**: the models, the data or the judge are not available, with the reason. "
          "**open**: it could be run here and has not been.")


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    DIRECTION = "direction only"
    NOT_REPRODUCED = "not reproduced"
    TOO_FEW = "too few prompts"
    NOT_COMPARABLE = "not comparable"
    NO_VALUE = "no value in the paper"
    UNTESTABLE = "not testable here"
    OPEN = "open"


def verdict(paper: float | None, ours: Estimate | None, neutral: float | None = 1.0, *, comparable: bool = True) -> Verdict:
    """Compare.

    Args:
        paper: its value; None where it has none.
        ours: None where it was not measured.
        neutral: as in `tables.Row`.
        comparable: as in `tables.Row`.

    >>> [str(verdict(1.4, Estimate(*ours))) for ours in ((1.3, 1.2, 1.35), (1.1, 1.05, 1.2), (1.1, 0.9, 1.2), (1.4, 0.9, 1.9))]
    ['reproduced', 'direction only', 'not reproduced', 'too few prompts']
    >>> str(verdict(1.12, Estimate(1.02, 0.99, 1.05)))  # within 15 %, and no effect
    'not reproduced'
    """
    if ours is None:
        return Verdict.OPEN
    if paper is None:
        return Verdict.NO_VALUE
    if not comparable:
        return Verdict.NOT_COMPARABLE
    if ours.high - ours.low > WIDEST * abs(ours.value):
        return Verdict.TOO_FEW
    inside = ours.low <= paper <= ours.high
    if neutral is None:
        return Verdict.REPRODUCED if inside or near(ours.value, paper, CLOSE) else Verdict.NOT_REPRODUCED
    if near(paper, neutral, NO_EFFECT):
        return Verdict.REPRODUCED if inside or near(ours.value, paper, NO_EFFECT) else Verdict.NOT_REPRODUCED
    if not (ours.low > neutral if paper > neutral else ours.high < neutral):
        return Verdict.NOT_REPRODUCED
    return Verdict.REPRODUCED if inside or near(ours.value, paper, CLOSE) else Verdict.DIRECTION


def near(value: float, reference: float, share: float) -> bool:
    """Whether a value differs from a reference by no more than a share of it, the last bit aside.

    >>> near(1.05, 1.0, 0.05), near(1.06, 1.0, 0.05)
    (True, False)
    """
    return abs(value - reference) <= share * abs(reference) + 1e-9
