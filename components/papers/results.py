"""Rows, compared: ours next to the paper's, with a verdict where both are of like conditions, what
a lossy method loses, and how much trust a value deserves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan

from draftwell.components.bench.runner import core_plan
from draftwell.components.bench.schema import BenchEntry
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import PLAIN
from draftwell.components.papers.estimates import Estimate, Sides, estimate, of_sums
from draftwell.components.papers.tables import Paper, Placed, Row, Table
from draftwell.components.papers.verdicts import (
    NATS,
    PARITY,
    Verdict,
    has_no_side,
    quality,
    trust,
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
        file: of its cell, and `entry` of the contender; None where it was not measured, and of an
            AUC.
        lost: of a lossy method: share of first choices, less lossless decoding's.
        worse: of a lossy method in a counted cell: log-likelihood a token, less plain decoding's.
        reason: word for why it is not comparable.
    """

    paper: Paper
    placed: Placed
    verdict: Verdict = Verdict.OPEN
    ours: Estimate | None = None
    file: CellFile | None = None
    entry: BenchEntry | None = None
    lost: Estimate | None = None
    worse: Estimate | None = None
    reason: str = ""

    @property
    def kind(self) -> str:
        """How the value came about: measured, replayed or counted."""
        return self.file.cell.kind if self.file else ""

    @property
    def prompts(self) -> int:
        """Of its cell."""
        return self.file.prompts if self.file else 0

    @property
    def settings(self) -> str:
        """Draft lengths and thresholds of what is compared."""
        row = self.placed.row
        return self.file.settings(row.role, row.over) if self.file and self.entry else ""

    @property
    def uneven(self) -> str:
        """Of a cell whose profile is not monotone and a method that overlaps: where."""
        overlaps = self.entry and find_strategy(core_plan(self.entry.strategy or "")[0]).overlaps
        return self.file.uneven if self.file and overlaps else ""

    @property
    def provisional(self) -> bool:
        """Whether the state of the machine's memory can move it."""
        if self.file is None or self.entry is None or self.kind != "measured":
            return False
        timed = self.placed.row.metric in TIMES or self.entry.strategy == "duo_decoding"
        return timed and not self.file.report.machine.cuda

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
        return "low" if self.provisional or self.uneven else trust(self.prompts)


def results(paper: Paper, files: Mapping[str, CellFile]) -> list[tuple[Table, list[Result]]]:
    """Its tables with every row compared; those of cells that were not measured are open."""
    return [
        (table, [result(paper, one, files.get(one.cell)) for one in rows])
        for table, rows in paper.placed
    ]


def result(paper: Paper, placed: Placed, file: CellFile | None) -> Result:
    """One row."""
    row = placed.row
    if file is None or (ours := value_of(row, file)) is None:
        return Result(paper, placed)
    reason = row.unlike or ("cost" if costs_otherwise(placed, file) else "")
    judged = verdict(placed.paper, ours, row.neutral, comparable=not reason, flattered=row.early)
    if row.metric in MARGINS:
        judged = quality(ours, MARGINS[row.metric])
    entry = None if row.metric == "auc" else file.entry(row.role)
    lost = worse = None
    if entry is not None and not entry.lossless:
        lost = first_choices(file, row.role)
        if file.cell.kind == "counted":
            worse = estimate("log_likelihood", entry, file.entry(PLAIN))
    return Result(paper, placed, judged, ours, file, entry, lost, worse, reason or "early")


def value_of(row: Row, file: CellFile) -> Estimate | None:
    """Ours; None where the cell has none."""
    if row.metric == "auc":
        found = file.aucs.get(row.role, {}).get(row.at)
        return Estimate(*found) if found else None
    if not all(file.has(role) for role in (row.role, row.over or PLAIN)):
        return None
    if row.metric == "argmax" and row.over == PLAIN:
        return first_choices(file, row.role)
    return estimate(row.metric, file.entry(row.role), file.entry(row.over) if row.over else None)


def first_choices(file: CellFile, role: str) -> Estimate | None:
    """The share of tokens that are the target's first choice, less plain decoding's.

    At a temperature plain decoding's text is one draw of many, and so is vanilla SD's: there it is
    less the share of all lossless strategies' texts together.
    """
    mine = file.entry(role)
    if not file.cell.temperature:
        return estimate("argmax", mine, file.entry(PLAIN))
    lossless = [one.per_prompt for one in file.report.strategies.values() if one.lossless]
    rows: list[Sides] = []
    for row, *others in zip(mine.per_prompt, *lossless, strict=True):
        base = sum(nan if one.target_argmax is None else one.target_argmax for one in others)
        rows.append((row.target_argmax, row.tokens, base, sum(one.tokens for one in others)))
    return of_sums(mine, rows, less=True)


def costs_otherwise(placed: Placed, file: CellFile) -> bool:
    """Whether a draft pass costs so much more or less here that speeds say nothing of the
    paper's."""
    if placed.row.metric not in TIMES or placed.cost is None or file.cost is None:
        return False
    return not 1 / OTHER_COST <= file.cost / placed.cost <= OTHER_COST
