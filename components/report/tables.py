"""Tables of text, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

LEFT = ("detail", "outputs identical?", "floor", "contender", "against")
"""Columns of text, aligned left."""
NOTICEABLE = 0.25
"""Cores of others from which on a thread less is faster (`thread_governor.LOST`)."""


def rich_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], note: str, title: str | None = None
) -> Table:
    """A table with the first column aligned left and numbers right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=None if title is None else Text(title), caption=Text(note), caption_justify="left"
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or name in LEFT else "right")
    for row in rows:
        table.add_row(*map(Text, row))  # plain text: brackets of an interval are no markup
    return table


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is aligned left, numbers right."""
    lines = [tuple(columns), tuple("---" if i == 0 else "--:" for i in range(len(columns))), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def number(value: float | None, form: str) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def first_turns(several: int) -> str:
    """What a caption adds after the number of prompts where some have several turns: benches decode
    the first.

    >>> f"30 prompts{first_turns(2)}", first_turns(0)
    ('30 prompts (of 2 with several turns the first only)', '')
    """
    return f" (of {several} with several turns the first only)" if several else ""


def span(values: Sequence[float], form: str = ".2f") -> str:
    """The lowest and the highest value.

    >>> span([1.35, 1.812]), span([1.2]), span([]), span([5.0, 7.0, 6.0], "g")
    ('1.35 to 1.81', '1.20', '–', '5 to 7')
    """
    return (
        " to ".join(dict.fromkeys(f"{end:{form}}" for end in (min(values), max(values))))
        if values
        else "–"
    )


def plural(count: int, noun: str) -> str:
    """A number of things.

    >>> plural(1, "run"), plural(3, "run")
    ('1 run', '3 runs')
    """
    return f"{count} {noun}{'s' if count != 1 else ''}"


def duration(seconds: float) -> str:
    """Minutes and seconds; hours too where there are some.

    >>> duration(7.4), duration(581), duration(7260)
    ('7 s', '9 min 41 s', '2 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def beside(others: float | None) -> str:
    """That other processes disturbed a measurement; empty where they did not. Plain decoding by
    several threads, which wait for each other, loses more by them than strategies that compute on
    one.

    Args:
        others: cores that the threads lacked; None where nobody looked.

    >>> beside(0.93), beside(0.02), beside(None)
    ('other processes used 0.9 of its cores', '', '')
    """
    if others is None or others < NOTICEABLE:
        return ""
    return f"other processes used {others:.1f} of its cores"
