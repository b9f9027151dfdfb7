"""Figures as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.report.tables import number, rich_table

if TYPE_CHECKING:
    from rich.table import Table

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
    """A figure's cells; shares by position are of the rounds that drafted."""
    acceptance = figure.acceptance
    shares = (
        [number(count / acceptance.rounds, ".2f") for count in acceptance.accepted_at]
        if acceptance.rounds
        else []
    )
    return [
        figure.label,
        str(figure.at_once),
        number(figure.tokens_per_second, ".1f"),
        number(figure.plain_tokens_per_second, ".1f"),
        number(figure.ratio, ".3f"),
        f"{figure.low:.3f}–{figure.high:.3f}",
        number(acceptance.rate, ".2f"),
        number(acceptance.length, ".2f"),
        " ".join(shares),
    ]
