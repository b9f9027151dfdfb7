"""The pages: a summary of what each paper claims and what was found here, and one page a paper."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from draftwell.components.bench.schema import Machine
from draftwell.components.papers import verdicts as rule
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import QUICK, Scale
from draftwell.components.papers.gain import gains
from draftwell.components.papers.prompts import SHIPPED
from draftwell.components.papers.public import DOWNLOADS, STAND_IN
from draftwell.components.papers.results import Result, results
from draftwell.components.papers.tables import FOLDER, Claim, Paper, Table
from draftwell.components.prompts.overlap import unknown_words
from draftwell.components.report.tables import number, span

UNITS = {"argmax": " of first choices", "log_likelihood": " nats a token"}
"""Metrics of quality → what stands behind their values."""
LOSSES = "What lossy methods gain and lose"
"""Key of the picture behind the tables."""
KNOWN_UNKNOWN = unknown_words(["distilled_draft"])
"""Of the source of prompts: what the summary says for all tables."""


@dataclass(frozen=True)
class Shown:
    """What pages are made of.

    Args:
        files: name → measured cell.
        failed: name → reason of cells that could not be measured.
        page: name of the summary's file, and of the folder of the papers' pages.
        emulated: a strategy and the one that it is compared with → cells of what was run on
            emulated devices.
    """

    papers: Sequence[Paper]
    scale: Scale
    files: Mapping[str, CellFile]
    failed: Mapping[str, str] = field(default_factory=dict)
    page: str = "papers"
    emulated: Mapping[tuple[str, ...], Sequence[str]] = field(default_factory=dict)

    @cached_property
    def tables(self) -> dict[str, list[tuple[Table, list[Result]]]]:
        """Paper → its tables; of another padding the rows whose cells were measured with it."""
        found = {paper.name: results(paper, self.files) for paper in self.papers}
        if self.scale.usual:
            return found
        there = {*self.files, *self.failed}
        for name, tables in found.items():
            kept = [(table, [r for r in rows if r.placed.cell in there]) for table, rows in tables]
            found[name] = [(table, rows) for table, rows in kept if rows]
        return found

    def rows(self, paper: Paper) -> list[Result]:
        """All rows of a paper."""
        return [row for _, rows in self.tables[paper.name] for row in rows]

    def cells(self, paper: Paper) -> dict[str, CellFile]:
        """Those of a paper that were measured."""
        return {name: self.files[name] for name in paper.cells if name in self.files}


def rendered(template: str, shown: Shown, **values: Any) -> str:
    """A page by its template in `claims/`."""
    pages = Environment(loader=FileSystemLoader(FOLDER), trim_blocks=True, lstrip_blocks=True)
    for one in (number, both, device_words, machine_words, source_words):
        pages.filters[one.__name__] = one
    for further in (remarks_on, command_of, claim_rows):
        pages.globals[further.__name__] = further
    text = pages.get_template(f"{template}.md").render(shown=shown, **values)
    return re.sub("\n{3,}", "\n\n", text).strip() + "\n"


def summary_page(shown: Shown) -> str:
    """Two screens: claims with verdicts, and how to read them."""
    return rendered("summary", shown, rule=rule, downloads=DOWNLOADS)


def paper_page(shown: Shown, paper: Paper, pictures: Mapping[str, Path]) -> str:
    """One paper: its tables, its cells, what is done otherwise and what is open."""
    found = gains(paper) if paper.name == "spide" else {}
    return rendered("paper", shown, paper=paper, pictures=pictures, losses=LOSSES, gains=found)


def padded_page(shown: Shown) -> str:
    """The page of another padding: the cells that were measured with it."""
    return rendered("padded", shown)


def claim_rows(shown: Shown, paper: Paper) -> list[list[str]]:
    """Of each claim a row for what was measured, one for what was replayed, one for emulated
    devices: all rows of its comparison together."""
    found = []
    for key, claim in paper.claims.items():
        mine = [one for one in shown.rows(paper) if one.placed.row.claim == key]
        kinds = dict.fromkeys(one.kind for one in mine if one.ours) or {"": None}
        for kind in kinds:
            some = [one for one in mine if one.kind == kind]
            found.append([f"{paper.name}: {claim.claim}", *claim_cells(shown, claim, kind, some)])
        if run := shown.emulated.get(tuple(claim.emulated)):
            found.append([f"{paper.name}: {claim.claim}", "as above", claim.regime, *run])
    return found


def claim_cells(shown: Shown, claim: Claim, kind: str, some: Sequence[Result]) -> list[str]:
    """All but the first column of one row of the claims."""
    theirs = [one.placed.paper for one in some if one.placed.paper is not None]
    known = [one for one in some if one.ours]
    files = {one.placed.cell: shown.files[one.placed.cell] for one in known}
    trust = [one.confidence for one in known]
    return [
        span(theirs),
        claim.regime,
        f"{kind}: {values_words(known)}" if known else "open",
        span([one.prompts for one in known], "g"),
        regime_words(kind, files) if known else "–",
        verdict_words(known),
        next((one for one in ("low", "medium", "high") if one in trust), "–"),
    ]


def values_words(known: Sequence[Result]) -> str:
    """Each value with its interval; of more than three the lowest and the highest."""
    values = sorted(one.ours for one in known if one.ours)
    unit = UNITS.get(known[0].placed.row.metric, "")
    if len(values) <= 3:
        return ", ".join(map(str, values)) + unit
    ends = f"{values[0]} to {values[-1]}"
    return f"{ends}{unit} ({len(values)} rows)"


def regime_words(kind: str, files: Mapping[str, CellFile]) -> str:
    """Acceptance, cost and machine of some cells."""
    alphas = [file.acceptance for file in files.values() if file.acceptance]
    costs = [file.cost for file in files.values() if file.cost is not None]
    cells = [file.cell for file in files.values()]
    assumed = dict.fromkeys(cell.cost_words for cell in cells if cell.kind != "measured")
    cost = f"c {', '.join(assumed) or span(costs)}"
    machines = dict.fromkeys(device_words(file.report.machine) for file in files.values())
    where = f", {' and '.join(machines)}" if kind == "measured" else ""
    tokens = span([cell.max_tokens for cell in cells], "g")
    return f"α {span(alphas)}, {cost}{where}, at most {tokens} tokens"


def verdict_words(known: Sequence[Result]) -> str:
    """How many rows got which verdict, and what qualifies them."""
    counts = Counter(
        f"{'speed only: ' if 'speed only' in one.words else ''}{one.verdict}"
        f"{' (no difference)' if one.no_difference else ''}"
        for one in known
    )
    words = ", ".join(f"{name} {count}" for name, count in counts.items())
    notes = [
        "provisional" if any(one.provisional for one in known) else "",
        f"{count} with an uneven profile"
        if (count := sum(bool(one.uneven) for one in known))
        else "",
    ]
    return "; ".join(filter(None, (words, *notes))) or "open"


def both(ours: float | None, theirs: float | None) -> str:
    """Ours, and the paper's in brackets where it is known.

    >>> both(0.512, 0.9), both(0.5, None), both(None, None)
    ('0.51 (0.90)', '0.50', '–')
    """
    return number(ours, ".2f") + (f" ({theirs:.2f})" if theirs else "")


def remarks_on(shown: Shown) -> list[str]:
    """Paragraphs that qualify a whole page: on the size of the run, and on shipped prompts."""
    stand_in = any(SHIPPED in file.source for file in shown.files.values())
    return [text for text in (shown.scale.remark, STAND_IN if stand_in else "") if text]


def command_of(shown: Shown, paper: Paper) -> str:
    """The command that measures a paper's cells as what is there was measured."""
    machine = next((file.report.machine for file in shown.cells(paper).values()), None)
    quick = " --set quick=true" if shown.scale.name == QUICK.name else ""
    options = (
        f" --set dtype={machine.dtype} --set device={(machine.device or 'cpu').partition(':')[0]} "
        f"--set threads={machine.threads}"
        if machine
        else ""
    )
    return (
        f"draftwell reproduce papers --data data{quick} --set only={paper.name}{options}"
        f"{shown.scale.pad_option}"
    )


def device_words(machine: Machine) -> str:
    """The GPU, if there is one, and the processor."""
    gpu = f"one {machine.device_name}, " if machine.cuda else ""
    return f"{gpu}{machine.cpu}, {machine.cores} cores"


def machine_words(machine: Machine) -> str:
    """Device, threads, number format and library."""
    torch = f", torch {machine.libraries['torch']}" if "torch" in machine.libraries else ""
    return f"{device_words(machine)}, {machine.threads} threads, {machine.dtype}{torch}"


def source_words(source: str) -> str:
    """Where prompts come from; that an artifact's training prompts are unknown is said once, for
    all tables."""
    return "; ".join(part for part in source.split("; ") if part != KNOWN_UNKNOWN)
