"""The page: every paper's tables next to ours, the formulas, what cannot be tested and what is open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.papers.cells import Scale
from components.papers.estimates import Estimate
from components.papers.points import measured_points
from components.papers.predictions import prediction_rows
from components.papers.runner import CellFile
from components.papers.tables import Paper, PaperTable
from components.papers.verdicts import OTHERS, RULE, Verdict, verdict
from components.report.tables import markdown, number

COLUMNS = ("value", "paper", "here", "interval", "verdict")
POINTS = "operating-points"
"""Key of the picture of all pairs, which belongs to no table."""
FORMULA_COLUMNS = ("engine", "acceptance", "γ", "c", "Leviathan's formula", "with measured passes", "measured", "share reached")
FORMULA_WORDS = "Predicted next to measured, both of decoding alone (the rows above have the prompt's reading, too; no formula has it):"


@dataclass(frozen=True)
class Result:
    """One row, compared."""

    what: str
    paper: float | None
    ours: Estimate | None
    verdict: Verdict

    def cells(self) -> list[str]:
        """As text, in `COLUMNS`."""
        ours = self.ours
        return [self.what, number(self.paper, ".2f"), "–" if ours is None else f"{ours.value:.2f}",
                "–" if ours is None else f"{ours.low:.2f} to {ours.high:.2f}", str(self.verdict)]


def results(table: PaperTable, file: CellFile | None) -> list[Result]:
    """The rows of a table; those of a cell that was not measured are open."""
    measured = None if file is None else file.measured()
    found = []
    for row in table.rows:
        ours = None if measured is None else measured.estimate(row)
        found.append(Result(row.what, row.paper, ours, verdict(row.paper, ours, row.neutral, comparable=row.comparable)))
    return found


def render(papers: Sequence[Paper], scale: Scale, cells: Mapping[str, CellFile], failed: Mapping[str, str] | None = None,
           pictures: Mapping[str, Path] | None = None, commands: Mapping[str, str] | None = None) -> str:
    """The whole page as Markdown.

    Args:
        cells: name → measured cell.
        failed: name → reason of cells that could not be measured.
        pictures: table's name → picture, as the page addresses it.
        commands: paper's name → the command that measures its tables.
    """
    parts = [opening(scale, cells)]
    compared = {table.name: results(table, cells.get(table.cell.name)) for paper in papers for table in paper.tables(scale)}
    parts += [overview(papers, scale, compared), operating_points(papers, scale, cells, (pictures or {}).get(POINTS))]
    for paper in papers:
        parts.append(f"## {paper.title}\n")
        if commands and paper.name in commands:
            parts.append(f"Made by `{commands[paper.name]}`.\n")
        for table in paper.tables(scale):
            parts.append(section(table, compared[table.name], cells.get(table.cell.name), (failed or {}).get(table.cell.name),
                                 (pictures or {}).get(table.name)))
        parts.append(closing(paper))
    return "\n".join(parts)


def opening(scale: Scale, cells: Mapping[str, CellFile]) -> str:
    """What the page is, how to run it, where it was measured, and the rule."""
    machines = sorted({f"{file.report.machine.cpu}, {file.report.machine.cores} cores, {file.report.machine.dtype}, commit "
                       f"{(file.report.machine.commit or 'unknown')[:9]}" for file in cells.values()})
    where = "; ".join(machines) or "nothing is measured yet"
    minutes = sum(file.seconds for file in cells.values()) / 60
    remark = f"{scale.remark}\n\n" if scale.remark else ""
    return ("# The papers' tables, run here\n\nMade by `draftwell papers`; run `make papers` (sized for six hours on two cores, resumable "
            "cell by cell) or `make papers FLAGS=--quick` (sized for 20 minutes). "
            f"Run: {scale.name}, {len(cells)} cells, {minutes:.0f} minutes. Measured on: {where}.\n\n{remark}"
            "Pairs named `near-copy` draft with the target itself, with fewer layers or rounded weights, and every target is padded with "
            "zeros (`--pad-target`), so that such a draft is cheap: the place of large models of one family, at this size. "
            "Equal cores: target and draft have a share of the cores each, of serial strategies too; plain decoding has "
            "all. Values are ratios unless a row says otherwise; intervals are bootstraps over prompts, "
            "5 % left out at each end. "
            f"The rule of verdicts: {RULE} {OTHERS}\n")


def overview(papers: Sequence[Paper], scale: Scale, compared: Mapping[str, Sequence[Result]]) -> str:
    """How many values of each paper got which verdict."""
    kinds = list(Verdict)
    rows = []
    for paper in papers:
        counts = Counter(result.verdict for table in paper.tables(scale) for result in compared[table.name])
        counts[Verdict.UNTESTABLE] += len(paper.untestable)
        counts[Verdict.OPEN] += len(paper.open)
        rows.append([paper.name, *(str(counts[kind]) for kind in kinds)])
    return markdown(("paper", *map(str, kinds)), rows)


def operating_points(papers: Sequence[Paper], scale: Scale, cells: Mapping[str, CellFile], picture: Path | None) -> str:
    """Acceptance against cost of the pairs that were measured, by SD on each set of prompts."""
    rows = [[name, point.pair, f"{point.c:.3f}", f"{point.acceptance:.2f}", number(point.speed, ".2f")]
            for name, point in measured_points(papers, scale, cells).items()]
    if not rows:
        return ""
    text = ("## Where our pairs are\n\nA draft's cost c is its pass over the target's, both over one token on all cores; all targets are "
            f"padded (`--pad-target`).\n\n{markdown(('cell', 'pair', 'c', 'acceptance of SD', 'fastest SD over plain'), rows)}")
    return text + (f"\n![Acceptance against cost]({picture.as_posix()})\n" if picture else "")


def section(table: PaperTable, compared: Sequence[Result], file: CellFile | None, failure: str | None, picture: Path | None) -> str:
    """One table with the formulas of its cell."""
    missing = f" Not measured: {failure}." if failure else "" if file else " Not measured yet."
    source = f"; {file.source}" if file else ""
    words = " ".join((table.why, *table.notes)) + acceptance_words(table, file)
    text = (f"### {table.title}\n\nThere: {table.theirs}. Here: {table.ours}{source}.{missing}\n\n"
            f"{markdown(COLUMNS, [result.cells() for result in compared])}\n{words}\n")
    rows = prediction_rows(file) if file and table.formulas else []
    if rows and file:
        text += f"\n{' '.join((FORMULA_WORDS, *file.notes))}\n\n{markdown(FORMULA_COLUMNS, rows)}"
    return text + (f"\n![{table.title}]({picture.as_posix()})\n" if picture else "")


def acceptance_words(table: PaperTable, file: CellFile | None) -> str:
    """Both acceptance rates, where they are known."""
    if table.acceptance is None or file is None or "SD" not in table.cell.contenders:
        return ""
    ours = file.measured().entry("SD").acceptance_rate
    theirs = f"the paper's is {table.acceptance:.2f} ({table.acceptance_from})"
    return "" if ours is None else f" Chance that SD accepts a token: {theirs}, here it is {ours:.2f} (accepted / judged)."


def closing(paper: Paper) -> str:
    """Deviations, what cannot be tested, what is open."""
    lines = [f"- {text}" for text in paper.deviations]
    text = "### Deviations\n\n" + "\n".join(lines) + "\n" if lines else ""
    lines = [f"- {what}: not testable here: {why}." for what, why in paper.untestable] + [f"- {what}: open." for what in paper.open]
    return text + ("\n### Not in the tables\n\n" + "\n".join(lines) + "\n" if lines else "")
