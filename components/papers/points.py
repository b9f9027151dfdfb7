"""Operating points: what a draft costs and how often it is accepted, ours as measured and SPIDE's as its tables give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from components.papers import spide
from components.papers.cells import Scale
from components.papers.runner import CellFile
from components.papers.tables import Paper


class Point(NamedTuple):
    """One pair on one set of prompts.

    Args:
        data: a name of `prompts.SETS`.
        c: seconds of a draft pass over those of a target pass, both over one token.
        acceptance: chance that SD accepts a token.
        speed: SD's over plain decoding; None where it is not measured.
    """

    pair: str
    data: str
    c: float
    acceptance: float
    speed: float | None = None


def measured_points(papers: Sequence[Paper], scale: Scale, cells: Mapping[str, CellFile]) -> dict[str, Point]:
    """Cell's name → its point, of the cells that measured SD; c with all cores for each pass, the fastest SD of the cell."""
    found = {}
    for table in [table for paper in papers for table in paper.tables(scale)]:
        file = cells.get(table.cell.name)
        if file is None or file.costs is None or "SD" not in table.cell.contenders:
            continue
        entry = file.measured().entry("SD")
        if entry.acceptance_rate is not None and entry.speedup is not None:
            c = file.costs.t_draft / file.costs.t_verify[1]
            found[table.cell.name] = Point(table.cell.pair, table.cell.data, c, entry.acceptance_rate, entry.speedup)
    return found


def published_points() -> list[Point]:
    """SPIDE's six pairs on its two data sets: c is 1 / s of Table 18, at most (s is rounded down); acceptance by MAT and γ."""
    return [Point(name, data, 1 / spide.TABLE_18[theirs], spide.acceptance_of(values, theirs), values["SD"][theirs][0])
            for theirs, name in enumerate(spide.THEIR_PAIRS) for data, values in (("code", spide.TABLE_1), ("maths", spide.TABLE_2))]
