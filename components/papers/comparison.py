"""The rows of a table, compared: ours next to the paper's, with a verdict where both are of like
conditions."""

from __future__ import annotations

from dataclasses import dataclass

from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import PLAIN_SHARE
from draftwell.components.papers.confidence import positions, row_words, share_kept
from draftwell.components.papers.estimates import Estimate
from draftwell.components.papers.tables import PaperTable, Row
from draftwell.components.papers.verdicts import Verdict, verdict
from draftwell.components.report.tables import number

COLUMNS = ("value", "paper", "here", "interval", "whole request", "settings", "verdict")
OTHER_COST = 2.0
"""Times the paper's c, or its part, up to which speeds get a verdict."""


@dataclass(frozen=True)
class Result:
    """One row, compared."""

    what: str
    paper: float | None
    ours: Estimate | None
    verdict: Verdict
    whole: float | None = None
    settings: str = ""
    remark: str = ""

    def cells(self) -> list[str]:
        """As text, in `COLUMNS`."""
        ours = self.ours
        return [
            self.what,
            number(self.paper, ".2f"),
            "–" if ours is None else f"{ours.value:.2f}",
            "–" if ours is None else f"{ours.low:.2f} to {ours.high:.2f}",
            number(self.whole, ".2f"),
            self.settings,
            f"{self.verdict} ({self.remark})" if self.remark else str(self.verdict),
        ]


def results(table: PaperTable, file: CellFile | None) -> list[Result]:
    """The rows of a table; those of a cell that was not measured are open."""
    measured = None if file is None else file.measured()
    found = []
    for row in table.rows:
        ours = None if measured is None else measured.estimate(row)
        judged = verdict(
            row.paper,
            ours,
            row.neutral,
            comparable=is_comparable(table, row, file),
            flattered=row.flattered,
        )
        whole, settings = (
            (None, "") if measured is None else (measured.whole(row), measured.settings(row))
        )
        found.append(
            Result(
                row.what,
                row.paper,
                ours,
                judged,
                whole,
                settings,
                remark_on(row, ours, judged),
            )
        )
    for confidence_bin, paper in table.confidence.items():
        texts = file.confidence if file else ()
        ours = share_kept(texts, confidence_bin) if texts else None
        found.append(
            Result(
                row_words(confidence_bin),
                paper,
                ours,
                verdict(paper, ours, None, comparable=False),
                settings=f"{positions(texts, confidence_bin)} positions" if texts else "",
            )
        )
    for ratio, paper in table.aucs.items():
        auc = Estimate(*file.roc[ratio].auc) if file and ratio in file.roc else None
        whose = next(iter(file.aucs), "the verifier") if file else "the verifier"
        found.append(
            Result(
                f"AUC of {whose}, λ {ratio}",
                paper,
                auc,
                verdict(paper, auc, None, comparable=False),
                settings=f"λ {ratio}; 95 % interval",
            )
        )
    return found


def remark_on(row: Row, ours: Estimate | None, judged: Verdict) -> str:
    """What a reader of a verdict must know: that ours is larger where that is why it fails."""
    larger = (
        ours is not None
        and judged == Verdict.NOT_REPRODUCED
        and row.paper is not None
        and row.neutral is not None
        and ours.low > row.paper >= row.neutral
    )
    return "ours is larger" if larger else ""


def is_comparable(table: PaperTable, row: Row, file: CellFile | None) -> bool:
    """Whether a row's value, as it was measured, may be compared with the paper's."""
    if row.metric == "speed" and costs_otherwise(table, file):
        return False
    drifted = file is not None and file.drift is not None
    return row.comparable and not (drifted and row.against == PLAIN_SHARE)


def costs_otherwise(table: PaperTable, file: CellFile | None) -> bool:
    """Whether a draft pass costs so much more or less here that speeds say nothing of the
    paper's."""
    if table.cost is None or file is None or file.cost is None:
        return False
    return not 1 / OTHER_COST <= file.cost / table.cost <= OTHER_COST
