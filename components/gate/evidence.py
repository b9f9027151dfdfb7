"""Checks of a measurement with an interval: passed or failed where the interval leaves no doubt,
else not enough evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from draftwell.serving.bundle.verdict import Check

MOST_PROMPTS = 5000
"""A larger estimate is not reported: the value is as good as at the threshold, and more prompts
will not tell."""


@dataclass(frozen=True)
class Interval:
    """A measured value, between one-sided bounds of 5 % each, over so many prompts."""

    value: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        return f"[{self.low:.2f}, {self.high:.2f}]"


def at_least(name: str, found: Interval, floor: float, detail: str) -> Check:
    """The value must reach `floor`: passed where the lower bound does, failed where not even the
    upper one does."""
    if found.low >= floor or found.high < floor:
        return Check(name, found.low, floor, found.low >= floor, detail)
    return undecided(name, found, detail, floor)


def at_most(name: str, found: Interval, limit: float, detail: str) -> Check:
    """The value must not exceed `limit`: passed where the upper bound does not, failed where even
    the lower one does."""
    if found.high <= limit or found.low > limit:
        return Check(name, found.high, limit, found.high <= limit, detail)
    return undecided(name, found, detail, limit)


def within(name: str, found: Interval, limit: float, detail: str) -> Check:
    """The value must be between −`limit` and `limit`: passed where both bounds are, failed where
    both are beyond the same end.

    Both bounds leave out 5 %, so it passes wrongly in 5 % of cases at most (two one-sided tests).
    """
    if max(abs(found.low), abs(found.high)) <= limit:
        return Check(name, max(abs(found.low), abs(found.high)), limit, True, detail)
    if found.low > limit or found.high < -limit:
        return Check(name, min(abs(found.low), abs(found.high)), limit, False, detail)
    return undecided(name, found, detail, limit, -limit)


def surely(check: Check, detail: str) -> Check:
    """A check that fails beyond doubt only: where there is not enough evidence it passes.

    Args:
        detail: what is said of it then.
    """
    if check.enough:
        return check
    return replace(check, passed=True, enough=True, detail=detail, prompts_needed=None)


def undecided(name: str, found: Interval, detail: str, *thresholds: float) -> Check:
    """A threshold is inside the interval; the first one is named."""
    wanted = [prompts_to_decide(found, threshold) for threshold in thresholds]
    known = [number for number in wanted if number is not None]
    needed = max(known) if len(known) == len(wanted) else None
    if found.prompts < 2:
        more = "one prompt has no interval"
    else:
        more = (
            f"an estimated {needed} prompts would decide"
            if needed
            else "it is too close to the threshold for more prompts to decide"
        )
    return Check(
        name,
        found.value,
        thresholds[0],
        False,
        f"{detail}: not enough evidence from {found.prompts} prompts, {more}",
        enough=False,
        prompts_needed=needed,
    )


def prompts_to_decide(found: Interval, threshold: float) -> int | None:
    """How many prompts would bring both bounds to the value's side of the threshold, if the value
    stayed the same.

    An interval shrinks with the square root of the prompts: n · ((value − bound) / (value −
    threshold))².

    Returns:
        None where it is more than `MOST_PROMPTS`, or where one prompt says nothing about others.

    >>> prompts_to_decide(Interval(1.1, 0.9, 1.3, 16), 1.0)
    64
    """
    beyond = found.low if found.value >= threshold else found.high
    margin, width = abs(found.value - threshold), abs(found.value - beyond)
    if not math.isfinite(width) or width > margin * math.sqrt(MOST_PROMPTS / found.prompts):
        return None
    return math.ceil(round(found.prompts * (width / margin) ** 2, 6))
