"""A card as one HTML page that fetches nothing and runs nothing: its style is in its head, its bars
are drawings in the text, so that a policy with the style's hash is all that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from draftwell.components.card.card import Card, Speed, Tried
from draftwell.components.card.words import TRIED, cells, facts, headline, settings_of, title
from draftwell.components.report.html import render_page

TEMPLATE = Path(__file__).parent / "templates" / "card.html.j2"


class Bar(NamedTuple):
    """A bar in percent of the longest of its table."""

    ratio: float
    even: float
    low: float | None = None
    high: float | None = None


class Line(NamedTuple):
    """A row of a table of speeds."""

    name: str
    why: str
    cells: Sequence[str]
    bar: Bar


def card_html(card: Card) -> str:
    """A card as the text of a self-contained page, all that comes from outside escaped."""
    tables = [
        ("By kind of prompt", "kind", False, [(row, "") for row in card.by_kind]),
        ("By number of requests at once", "requests", False, [(r, "") for r in card.by_requests]),
        (TRIED.capitalize(), "strategy", True, [(t.speed, why_not(t)) for t in card.tried]),
    ]
    return render_page(
        TEMPLATE,
        card=card,
        title=title(card),
        headline=headline(card),
        tables=[(h, first, lost, lines(rows)) for h, first, lost, rows in tables if rows],
        facts=facts(card),
    )


def why_not(tried: Tried) -> str:
    """The settings of what was tried, and why it was not chosen."""
    given = settings_of(tried.parameters)
    return f"{given}: {tried.why_not}" if given else tried.why_not


def lines(rows: Sequence[tuple[Speed, str]]) -> list[Line]:
    """Rows of a table, whose bars have one scale."""
    longest = max([1.0, *ends(speed for speed, _ in rows)])

    def percent(value: float) -> float:
        return round(100 * max(0.0, value) / longest, 2)

    found = []
    for speed, why in rows:
        name, *others = cells(speed)
        bar = Bar(percent(speed.ratio), percent(1.0))
        if speed.low is not None and speed.high is not None:
            bar = bar._replace(low=percent(speed.low), high=percent(speed.high))
        found.append(Line(name, why, others, bar))
    return found


def ends(speeds: Iterable[Speed]) -> list[float]:
    """The right end of each bar or interval."""
    return [max(speed.ratio, speed.high or 0.0) for speed in speeds]
