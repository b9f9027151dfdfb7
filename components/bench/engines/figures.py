"""Figures of an engine's settings: speed over its plain decoding with an interval, tokens a second,
acceptance; and a table of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from draftwell.components.bench.categories import CategoryFigure, Drafts, category_figures
from draftwell.components.bench.engines.measure import Beside, Side, middle_of
from draftwell.components.engines.port import Acceptance, Message
from draftwell.components.report.intervals import TAIL, ratio_of
from draftwell.components.report.tables import number, rich_table

if TYPE_CHECKING:
    from rich.table import Table


class Figure(Message):
    """One way to speculate at one load, compared with plain decoding of the same engine."""

    label: str
    at_once: int = Field(ge=1, description="requests that are decoded at once")
    groups: int = Field(ge=1, description="that were sent, one after the other")
    prompts: int = Field(
        ge=1,
        description="distinct ones, which the interval is over; above one at once also over groups",
    )
    ratio: float = Field(gt=0, description="times plain decoding's tokens a second")
    low: float
    high: float
    tokens_per_second: float
    plain_tokens_per_second: float
    acceptance: Acceptance = Acceptance()
    categories: tuple[CategoryFigure, ...] = Field(
        (), strict=False, description="of prompts, where they are of several"
    )

    @property
    def surely_faster(self) -> bool:
        """Whether even the low end is above 1."""
        return self.low > 1.0

    @property
    def surely_slower(self) -> bool:
        """Whether even the high end is below 1."""
        return self.high < 1.0


def figure_of(label: str, beside: Beside, tail: float = TAIL) -> Figure:
    """Compare two sides.

    The interval is over distinct prompts. Where several are sent at once, a group's time is that of
    the group, and says little of each prompt: then it reaches as far as that over groups, too,
    whichever is wider at each end. Sides that decoded apart, in two halves, did so on a machine
    that may have changed meanwhile: then both ends are moved by as much as the halves differ.
    """
    plain, other = beside.plain, beside.other
    one, two = by_prompt(plain, beside.prompts), by_prompt(other, beside.prompts)
    ratio, low, high = ratio_of(one, two, tail)
    if beside.at_once > 1:
        over_groups = ratio_of(plain, other, tail)
        low, high = min(low, over_groups.low), max(high, over_groups.high)
    if beside.apart:
        moved = drift_of(plain, other)
        low, high = low / moved, high * moved
    return Figure(
        label=label,
        at_once=beside.at_once,
        groups=len(plain.seconds),
        prompts=len(one.seconds),
        ratio=ratio,
        low=low,
        high=high,
        tokens_per_second=sum(other.tokens) / sum(other.seconds),
        plain_tokens_per_second=sum(plain.tokens) / sum(plain.seconds),
        acceptance=other.acceptance,
    )


def drift_of(plain: Side, other: Side) -> float:
    """By what factor two halves of a comparison differ, at least 1.

    >>> sides = [Side(seconds=seconds, tokens=[6, 6]) for seconds in ([2.0, 2.0], [1.0, 2.0])]
    >>> drift_of(*sides)
    2.0
    """
    half = middle_of(plain.seconds)
    speeds = [
        sum(side.tokens[part]) / sum(side.seconds[part])
        for part in (slice(half), slice(half, None))
        for side in (plain, other)
        if side.seconds[part]
    ]
    if len(speeds) < 4:  # a single group has no second half
        return 1.0
    first, second = speeds[1] / speeds[0], speeds[3] / speeds[2]
    return math.exp(abs(math.log(first / second)))


def by_prompt(side: Side, places: Sequence[Sequence[int]]) -> Side:
    """Seconds and tokens of each distinct prompt; the seconds of a group are divided by those that
    its prompts took.

    >>> side = Side(seconds=[3.0], tokens=[3], each_seconds=[[3.0, 1.5]], outputs=[[[5, 5], [6]]])
    >>> found = by_prompt(side, [[0, 1]])
    >>> found.seconds, found.tokens
    ([2.0, 1.0], [2, 1])
    """
    if not places:
        return side
    count = 1 + max(max(group) for group in places)
    seconds, tokens = [0.0] * count, [0] * count
    for group, whole, each, outputs in zip(
        places, side.seconds, side.each_seconds, side.outputs, strict=True
    ):
        for place, own, output in zip(group, each, outputs, strict=True):
            seconds[place] += whole * own / sum(each)
            tokens[place] += len(output)
    return Side(seconds=seconds, tokens=tokens)


def by_category(beside: Beside, categories: Sequence[str]) -> tuple[CategoryFigure, ...]:
    """Figures by category of prompts.

    Args:
        categories: of the distinct prompts, in the order in which they were first sent.
    """
    drafts = Drafts([0] * len(categories), [0] * len(categories))
    for places, group in zip(beside.prompts, beside.other.each_drafts, strict=True):
        for place, (rounds, accepted) in zip(places, group, strict=True):
            drafts.rounds[place] += rounds
            drafts.accepted[place] += accepted
    plain, other = (by_prompt(side, beside.prompts) for side in (beside.plain, beside.other))
    return category_figures(categories, plain, other, drafts)


COLUMNS = (
    "method",
    "at once",
    "tokens/s",
    "plain",
    "ratio",
    "interval",
    "acceptance",
    "length",
    "accepted by position",
)


def figure_table(figures: Sequence[Figure], caption: str) -> Table:
    """One row for each; ratios are to plain decoding beside it."""
    return rich_table(COLUMNS, [row_of(figure) for figure in figures], caption)


def row_of(figure: Figure) -> list[str]:
    """A figure's cells."""
    return [
        figure.label,
        str(figure.at_once),
        number(figure.tokens_per_second, ".1f"),
        *beside_cells(figure),
        *acceptance_cells(figure.acceptance),
    ]


def beside_cells(figure: Figure) -> list[str]:
    """Plain decoding's speed, and the ratio to it with its interval."""
    return [
        number(figure.plain_tokens_per_second, ".1f"),
        number(figure.ratio, ".3f"),
        f"{figure.low:.3f}–{figure.high:.3f}",
    ]


def acceptance_cells(acceptance: Acceptance) -> list[str]:
    """Rate, length and shares by position, which are of the rounds that drafted."""
    shares = (
        [number(count / acceptance.rounds, ".2f") for count in acceptance.accepted_at]
        if acceptance.rounds
        else []
    )
    return [
        number(acceptance.rate, ".2f"),
        number(acceptance.length, ".2f"),
        " ".join(shares),
    ]
