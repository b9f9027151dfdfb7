"""The rule by which a value measured here is compared with a paper's."""

from __future__ import annotations

from enum import StrEnum

from components.papers.estimates import Estimate

CLOSE = 0.15
"""Relative difference up to which a value counts as the paper's."""
WIDEST = 0.5
"""Width of an interval, over its value, from which it decides nothing: with three prompts almost any value would be inside."""
RULE = (f"**reproduced**: our value is within {CLOSE:.0%} of the paper's, or the paper's value is inside our interval and that is "
        f"narrower than {WIDEST:.0%} of our value, unless our whole interval is on the other side of \"no effect\". "
        "**direction only**: our whole interval is on the same side of \"no effect\" as the paper's value. **not reproduced**: neither. "
        "**not testable here**: the models, the data or the judge are not available, with the reason. "
        "**open**: it could be run here and has not been.")


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    DIRECTION = "direction only"
    NOT_REPRODUCED = "not reproduced"
    UNTESTABLE = "not testable here"
    OPEN = "open"


def verdict(paper: float, ours: Estimate | None, neutral: float | None = 1.0) -> Verdict:
    """Compare.

    Args:
        paper: its value.
        ours: None where it was not measured.
        neutral: as in `tables.Row`.

    >>> [str(verdict(1.4, Estimate(*ours))) for ours in ((1.3, 1.2, 1.35), (1.1, 1.05, 1.2), (1.1, 0.9, 1.2))]
    ['reproduced', 'direction only', 'not reproduced']
    >>> str(verdict(1.06, Estimate(0.92, 0.90, 0.94)))  # near, and the opposite
    'not reproduced'
    """
    if ours is None:
        return Verdict.OPEN
    if neutral is not None and ((paper > neutral and ours.high < neutral) or (paper < neutral and ours.low > neutral)):
        return Verdict.NOT_REPRODUCED
    narrow = ours.high - ours.low <= WIDEST * abs(ours.value)
    if abs(ours.value - paper) <= CLOSE * abs(paper) or (narrow and ours.low <= paper <= ours.high):
        return Verdict.REPRODUCED
    if neutral is not None and ((paper > neutral and ours.low > neutral) or (paper < neutral and ours.high < neutral)):
        return Verdict.DIRECTION
    return Verdict.NOT_REPRODUCED
