"""Rows, compared: ours next to the paper's, with a verdict where both are of like conditions, what
a lossy method loses, and how much trust a value deserves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from draftwell.components.bench.runner import core_plan
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import PLAIN
from draftwell.components.papers.estimates import (
    Estimate,
    Measured,
    estimate,
    first_choices,
)
from draftwell.components.papers.tables import Paper, Placed, Row, Table
from draftwell.components.papers.verdicts import (
    ENOUGH,
    FEW,
    NATS,
    PARITY,
    Verdict,
    has_no_side,
    quality,
    verdict,
)
from draftwell.serving.runtime.strategies import find_strategy

OTHER_COST = 2.0
"""Times the paper's c, or its part, up to which speeds get a verdict."""
MARGINS = {"argmax": PARITY, "log_likelihood": NATS}
"""Metrics of quality → what may be lost."""
TIMES = ("speed", "request", "ttft")
"""Metrics that the state of the machine's memory moves."""


@dataclass(frozen=True)
class Result:
    """One row, compared.

    Args:
        kind: measured, replayed or emulated.
        lost: of a lossy method: share of first choices, less lossless decoding's.
        worse: of a lossy method in a counted cell: log-likelihood a token, less plain decoding's.
        uneven: of a cell whose profile is not monotone and a method that overlaps: where.
        provisional: whether the state of the machine's memory can move it.
        prompts: of its cell.
        reason: word for why it is not comparable.
    """

    paper: Paper
    placed: Placed
    verdict: Verdict
    ours: Estimate | None = None
    kind: str = ""
    settings: str = ""
    lost: Estimate | None = None
    worse: Estimate | None = None
    uneven: str = ""
    provisional: bool = False
    prompts: int = 0
    reason: str = ""

    @property
    def words(self) -> str:
        """The verdict with all that qualifies it."""
        row = self.placed.row
        larger = (
            self.ours is not None
            and self.verdict == Verdict.NOT_REPRODUCED
            and self.placed.paper is not None
            and row.neutral is not None
            and self.ours.low > self.placed.paper >= row.neutral
        )
        judged = self.verdict not in (Verdict.NO_VALUE, Verdict.OPEN, Verdict.NOT_COMPARABLE)
        return "".join(
            (
                "speed only: " if judged and row.metric in TIMES and self.loses else "",
                str(self.verdict),
                f" ({self.reason})" if self.verdict == Verdict.NOT_COMPARABLE else "",
                " (ours is larger)" if larger else "",
                ", provisional" if judged and self.provisional else "",
                ", uneven profile" if self.uneven else "",
            )
        )

    @property
    def no_difference(self) -> bool:
        """Whether what is reproduced is that there is next to no effect."""
        paper, neutral = self.placed.paper, self.placed.row.neutral
        return (
            self.verdict == Verdict.REPRODUCED
            and paper is not None
            and neutral is not None
            and has_no_side(paper, neutral)
        )

    @property
    def loses(self) -> bool:
        """Whether it is lossy, and its quality is not shown to hold."""
        if self.worse is not None:
            return quality(self.worse, NATS) != Verdict.KEPT
        return self.lost is not None and quality(self.lost) != Verdict.KEPT

    @property
    def confidence(self) -> str:
        """How much trust the value deserves, by the rule of `verdicts`."""
        if self.provisional or self.uneven or self.prompts < FEW:
            return "low"
        return "high" if self.prompts >= ENOUGH else "medium"


def results(paper: Paper, files: Mapping[str, CellFile]) -> list[tuple[Table, list[Result]]]:
    """Its tables with every row compared; those of cells that were not measured are open."""
    measured = {name: file.measured() for name, file in files.items() if name in paper.cells}
    return [
        (table, [result(paper, one, files.get(one.cell), measured.get(one.cell)) for one in rows])
        for table, rows in paper.placed
    ]


def result(
    paper: Paper, placed: Placed, file: CellFile | None, measured: Measured | None
) -> Result:
    """One row; `measured`: of the file."""
    row = placed.row
    ours = None if file is None or measured is None else value_of(row, file, measured)
    if file is None or measured is None or ours is None:
        return Result(paper, placed, Verdict.OPEN)
    reason = row.unlike or ("cost" if costs_otherwise(placed, file) else "")
    judged = verdict(placed.paper, ours, row.neutral, comparable=not reason, flattered=row.early)
    found = Result(
        paper,
        placed,
        judged,
        ours,
        file.kind,
        prompts=len(set(file.report.prompt_ids)),
        reason=reason or "early",
    )
    if row.metric == "auc":
        return found
    entry = measured.entry(row.role)
    overlaps = find_strategy(core_plan(entry.strategy or "")[0]).overlaps
    return replace(
        found,
        verdict=quality(ours, MARGINS[row.metric]) if row.metric in MARGINS else judged,
        settings=measured.settings(row.role, row.over),
        lost=None if entry.lossless else first_choices(measured, row.role),
        worse=None
        if entry.lossless or file.kind != "counted"
        else estimate("log_likelihood", measured.entry(row.role), measured.entry(PLAIN)),
        uneven=file.uneven if overlaps else "",
        provisional=file.kind == "measured"
        and not file.report.machine.cuda
        and (row.metric in TIMES or entry.strategy == "duo_decoding"),
    )


def value_of(row: Row, file: CellFile, measured: Measured) -> Estimate | None:
    """Ours; None where the cell has none."""
    if row.metric == "auc":
        found = file.aucs.get(row.role, {}).get(row.at)
        return Estimate(*found) if found else None
    roles = (row.role, row.over) if row.over else (row.role,)
    if not all(measured.has(role) for role in roles):
        return None
    if row.metric == "argmax" and row.over == PLAIN:
        return first_choices(measured, row.role)
    entries = [measured.entry(role) for role in roles]
    return estimate(row.metric, entries[0], entries[1] if row.over else None)


def costs_otherwise(placed: Placed, file: CellFile) -> bool:
    """Whether a draft pass costs so much more or less here that speeds say nothing of the
    paper's."""
    if placed.row.metric not in TIMES or placed.cost is None or file.cost is None:
        return False
    return not 1 / OTHER_COST <= file.cost / placed.cost <= OTHER_COST


def acceptance_of(measured: Measured) -> float | None:
    """How many of the tokens that the target judged it kept, with vanilla SD."""
    known = (role for role in measured.labels if role.partition(",")[0] in ("SD", "SpS"))
    role = next(known, PLAIN)
    return measured.entry(role).acceptance_rate
