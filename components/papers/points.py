"""Operating points: what a draft costs and how often it is accepted, ours as measured and SPIDE's
as its tables give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from draftwell.components.papers import duodecoding, spide
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import PLAIN, Scale
from draftwell.components.papers.estimates import settings_of
from draftwell.components.papers.tables import Paper, Row

SD_ROLES = (spide.ALL_CORES, duodecoding.ALL_CORES, "SD")
"""Roles of vanilla SD, those with all cores first; "SD" has them where nothing else of its cell is
on equal cores."""


class Point(NamedTuple):
    """One pair on one set of prompts.

    Args:
        data: a name of `prompts.SETS`.
        c: seconds of a draft pass over those of a target pass, both over one token.
        acceptance: chance that SD accepts a token.
        speed: the fastest SD's over plain decoding, of decoding alone, with all cores where that
            was measured; None where none was.
        plain: tokens per second of plain decoding, of decoding alone; None of the papers' pairs.
        settings: of that SD.
    """

    pair: str
    data: str
    c: float
    acceptance: float
    speed: float | None = None
    plain: float | None = None
    settings: str = ""


def measured_points(
    papers: Sequence[Paper], scale: Scale, cells: Mapping[str, CellFile]
) -> dict[str, Point]:
    """Cell's name → its point, of the cells that measured SD: with all cores for each pass, as c
    is."""
    found = {}
    for table in [table for paper in papers for table in paper.tables(scale) if table.formulas]:
        file, role = (
            cells.get(table.cell.name),
            next((role for role in SD_ROLES if role in table.cell.contenders), None),
        )
        if file is None or file.cost is None or role is None:
            continue
        measured = file.measured()
        entry, speed = measured.entry(role), measured.estimate(Row("", None, "speed", role, PLAIN))
        if entry.acceptance_rate is not None and speed is not None:
            found[table.cell.name] = Point(
                table.cell.pair,
                table.cell.data,
                file.cost,
                entry.acceptance_rate,
                speed.value,
                measured.entry(PLAIN).decode_tokens_per_second,
                settings_of(entry),
            )
    return found


def published_points() -> list[Point]:
    """SPIDE's six pairs on its two data sets: c is 1 / s of Table 18, at most (s is rounded down);
    acceptance by MAT and γ."""
    return [
        Point(
            name,
            data,
            1 / spide.TABLE_18[theirs],
            spide.acceptance_of(values, theirs),
            values["SD"][theirs][0],
        )
        for theirs, name in enumerate(spide.THEIR_PAIRS)
        for data, values in (("code", spide.TABLE_1), ("maths", spide.TABLE_2))
    ]
