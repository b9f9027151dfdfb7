"""An engine at an address at several loads: its speed, its time to the first token and its
acceptance, beside plain decoding where there is some."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field

from draftwell.components.bench.engines.figures import (
    Figure,
    acceptance_cells,
    beside_cells,
    figure_of,
)
from draftwell.components.bench.engines.measure import (
    Group,
    Side,
    groups_of,
    measure_beside,
    places_of,
    side_of,
    warm_up,
)
from draftwell.components.bench.interleaved import Progress, take_turns
from draftwell.components.engines.port import Acceptance, Engine, Message
from draftwell.components.report.tables import number, rich_table
from draftwell.serving.runtime.requests import Sampling

if TYPE_CHECKING:
    from rich.table import Table

FEWEST_GROUPS = 2


class LoadFigure(Message):
    """An engine at one load."""

    at_once: int = Field(ge=1, description="requests that were sent at once")
    groups: int = Field(ge=1, description="that were sent, one after the other")
    prompts: int = Field(ge=1, description="distinct ones")
    tokens_per_second: float
    first_token_seconds: float = Field(description="median over requests")
    acceptance: Acceptance = Acceptance()
    beside: Figure | None = Field(None, description="the same beside plain decoding")


def measure_loads(
    engine: Engine,
    plain: Engine | None,
    prompts: Sequence[Sequence[int]],
    levels: Sequence[int],
    sampling: Sampling,
    *,
    progress: Progress | None = None,
) -> list[LoadFigure]:
    """A figure for each number of requests at once; engine and plain decoding take turns, group by
    group.

    Args:
        engine, plain: were started; plain None: it is not compared with anything.
        prompts: token ids.
        sampling: of the first prompt of a group; each further prompt of it has the next seed.
    """
    found = []
    for level in levels:
        groups = groups_of(prompts, level, max(FEWEST_GROUPS, -(-len(prompts) // level)))
        if plain is None:
            side, figure = measure_alone(engine, groups, sampling, progress=progress), None
        else:
            beside = measure_beside(plain, engine, groups, sampling, progress=progress)
            side, figure = beside.other, figure_of(engine.label, beside)
        found.append(load_figure(side, groups, figure))
    return found


def measure_alone(
    engine: Engine,
    groups: Sequence[Group],
    sampling: Sampling,
    *,
    progress: Progress | None = None,
) -> Side:
    """What an engine does with all groups, after a few tokens that are not measured."""
    warm_up(engine, groups[0], sampling)
    turns = {engine.label: lambda group: engine.decode(groups[group], sampling)}
    [decoded] = take_turns(turns, len(groups), progress=progress).values()
    return side_of([one for [one] in decoded])


def load_figure(side: Side, groups: Sequence[Group], beside: Figure | None) -> LoadFigure:
    """The figure of what an engine did with groups."""
    places = places_of(groups)
    return LoadFigure(
        at_once=len(groups[0]),
        groups=len(groups),
        prompts=1 + max(max(group) for group in places),
        tokens_per_second=sum(side.tokens) / sum(side.seconds),
        first_token_seconds=median(one for group in side.first_token_seconds for one in group),
        acceptance=side.acceptance,
        beside=beside,
    )


COLUMNS = (
    "at once",
    "tokens/s",
    "first token, ms",
    "plain",
    "ratio",
    "interval",
    "acceptance",
    "length",
    "accepted by position",
)


def load_table(figures: Sequence[LoadFigure], caption: str) -> Table:
    """One row for each load; ratios are to plain decoding beside it."""
    return rich_table(COLUMNS, [load_row(figure) for figure in figures], caption)


def load_row(figure: LoadFigure) -> list[str]:
    """A figure's cells, those of plain decoding empty where it was not measured."""
    return [
        str(figure.at_once),
        number(figure.tokens_per_second, ".1f"),
        number(1000 * figure.first_token_seconds, ".0f"),
        *(beside_cells(figure.beside) if figure.beside else [number(None, "")] * 3),
        *acceptance_cells(figure.acceptance),
    ]
