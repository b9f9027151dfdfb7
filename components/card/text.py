"""A card for the terminal: at most 40 lines of 80 columns. The page (`card.html`) has what does
not fit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftwell.components.card.card import Card, Speed, Tried
from draftwell.components.card.words import (
    TRIED,
    cells,
    evidence,
    facts,
    headline,
    settings_of,
    title,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

WIDTH = 80
LABEL = 9
"""Columns of a fact's name."""
MOST_LINES = 2
"""Of a fact, and of what was tried."""
MOST_KINDS, MOST_LEVELS, MOST_TRIED = 5, 4, 2
"""Rows that are shown; a line says how many more there are."""
ON_THE_PAGE = ("models", "bundle")
"""Facts that the terminal leaves to the page."""
COLUMNS = ("", "times as fast", "90 % interval", "prompts", "tokens/s")


def card_text(card: Card) -> Group:
    """A card as something that Rich prints.

    What was chosen and how much faster it is comes first, then the speeds by kind of prompt and by
    number of requests, what the figures hold for, what lost, and the next command.
    """
    from rich.console import Group
    from rich.text import Text

    sure = "bold green" if card.sure and card.speed is not None else "bold yellow"
    parts: list[Text | Table] = [
        clipped(title(card), WIDTH, 1, "bold"),
        clipped(headline(card), WIDTH, MOST_LINES, sure),
    ]
    shown = (
        ("by kind of prompt", card.by_kind, MOST_KINDS),
        ("by requests at once", card.by_requests, MOST_LEVELS),
    )
    if card.by_kind or card.by_requests:
        parts.append(speeds([(name, rows[:most]) for name, rows, most in shown if rows]))
    hidden = sum(max(0, len(rows) - most) for _, rows, most in shown)
    hidden += max(0, len(card.tried) - MOST_TRIED)
    parts += [
        clipped(f"{name:<{LABEL}}{value}", WIDTH, MOST_LINES, indent=LABEL)
        for name, value in facts(card).items()
        if name not in ON_THE_PAGE
    ]
    if card.tried:
        parts.append(Text(TRIED, style="bold"))
        parts += [
            clipped(lost(one), WIDTH, MOST_LINES, indent=4) for one in card.tried[:MOST_TRIED]
        ]
    if hidden:
        parts.append(Text(f"{hidden} more in card.html", style="dim"))
    parts.append(Text.assemble("next: ", (card.next_command, "bold")))
    return Group(*parts)


def speeds(groups: Sequence[tuple[str, Sequence[Speed]]]) -> Table:
    """A table with a heading for each group of rows."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, width=WIDTH, pad_edge=False, show_edge=False)
    table.add_column(COLUMNS[0], ratio=1, no_wrap=True, overflow="ellipsis")
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for heading, rows in groups:
        table.add_row(Text(heading, style="bold"))
        for row in rows:
            first, *others = cells(row)
            table.add_row(Text(f"  {first}"), *map(Text, others))
    return table


def lost(one: Tried) -> str:
    """What was tried, how many times as fast it was, and why it was not chosen."""
    given = settings_of(one.parameters)
    named = f"{one.speed.name} ({given})" if given else one.speed.name
    return f"  {named}: {one.speed.ratio:.2f} {evidence(one.speed)}: {one.why_not}"


def clipped(text: str, width: int, lines: int, style: str = "", indent: int = 0) -> Text:
    """A text in at most so many lines, the further ones indented; the end that does not fit is an
    ellipsis."""
    from rich.text import Text

    wrapped = textwrap.wrap(
        text, width, max_lines=lines, placeholder=" …", subsequent_indent=" " * indent
    )
    return Text("\n".join(wrapped), style=style)
