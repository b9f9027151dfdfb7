"""The pages: a summary of what each paper claims and what was found here, and one page a paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftwell.components.bench.interleaved import REFERENCE
from draftwell.components.bench.schema import Machine
from draftwell.components.papers import verdicts as rule
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import QUICK, Scale
from draftwell.components.papers.emulated import EmulatedGain, gains_of
from draftwell.components.papers.estimates import Estimate
from draftwell.components.papers.gain import gain_table
from draftwell.components.papers.prompts import SHIPPED
from draftwell.components.papers.public import DOWNLOADS, STAND_IN
from draftwell.components.papers.results import Result, acceptance_of, results
from draftwell.components.papers.tables import FOLDER, Claim, Paper, Table
from draftwell.components.prompts.overlap import unknown_words
from draftwell.components.report.tables import markdown, number, span

CLAIMS = ("claim", "the paper", "its regime", "here", "prompts", "regime here", "verdict", "trust")
ROWS = ("cell", "value", "paper", "here", "settings", "first choices", "verdict")
LOST = ROWS.index("first choices")
CELLS = ("cell", "pair", "prompts", "α", "c", "plain, tokens/s", "commit", "minutes")
CELLS_WORDS = (
    "Behind the number of prompts stands the beginning of their digest. α is vanilla SD's "
    "acceptance, c a draft pass over a target pass, both over one token; in brackets the paper's "
    "(c at most)."
)
UNITS = {"argmax": " of first choices", "log_likelihood": " nats a token"}
"""Metrics of quality → what stands behind their values."""
LOSSES = "What lossy methods gain and lose"
"""Key of the picture behind the tables."""
LISTS = {
    "deviations": "What is done otherwise",
    "inconsistencies": "Inconsistencies and arithmetic in the paper",
    "elsewhere": "Found by other means",
    "untestable": "Not testable here",
    "open": "Open",
}
KNOWN_UNKNOWN = unknown_words(["distilled_draft"])
"""Of the source of prompts: what the summary says for all tables."""


@dataclass(frozen=True)
class Shown:
    """What pages are made of.

    Args:
        files: name → measured cell.
        failed: name → reason of cells that could not be measured.
        page: name of the summary's file, and of the folder of the papers' pages.
        emulated: gains on emulated devices.
    """

    papers: Sequence[Paper]
    scale: Scale
    files: Mapping[str, CellFile]
    failed: Mapping[str, str] = field(default_factory=dict)
    page: str = "papers"
    emulated: Sequence[EmulatedGain] = ()
    known: dict[str, list[tuple[Table, list[Result]]]] = field(default_factory=dict, repr=False)

    def compared(self, paper: Paper) -> list[tuple[Table, list[Result]]]:
        """A paper's tables; of another padding the rows whose cells were measured with it."""
        if paper.name not in self.known:
            self.known[paper.name] = self._compare(paper)
        return self.known[paper.name]

    def _compare(self, paper: Paper) -> list[tuple[Table, list[Result]]]:
        found = results(paper, self.files)
        if self.scale.usual:
            return found
        there = {*self.files, *self.failed}
        kept = [(table, [one for one in rows if one.placed.cell in there]) for table, rows in found]
        return [(table, rows) for table, rows in kept if rows]

    def cells(self, paper: Paper) -> dict[str, CellFile]:
        """Those of a paper that were measured."""
        return {name: self.files[name] for name in paper.cells if name in self.files}


def template(name: str) -> str:
    """The words of a page."""
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def summary_page(shown: Shown) -> str:
    """Two screens: claims with verdicts, and how to read them."""
    rows = [row for paper in shown.papers for row in claim_rows(shown, paper)]
    whys = [
        f"- **{paper.name}, {claim.claim}.** {claim.why}"
        for paper in shown.papers
        for claim in paper.claims.values()
    ]
    minutes = sum(file.seconds for file in shown.files.values()) / 60
    return template("summary").format(
        remarks="".join(f"{text}\n\n" for text in remarks_on(shown)),
        claims=markdown(CLAIMS, rows),
        why="\n".join(whys),
        rule=rule,
        downloads=DOWNLOADS,
        minutes=f"{minutes:.0f}",
        scale=shown.scale.name,
        padded=shown.scale.padded,
        page=shown.page,
    )


def claim_rows(shown: Shown, paper: Paper) -> list[list[str]]:
    """Of each claim a row for what was measured, one for what was replayed, one for emulated
    devices: all rows of its comparison together."""
    found, every = [], [one for _, rows in shown.compared(paper) for one in rows]
    for key, claim in paper.claims.items():
        mine = [one for one in every if one.placed.row.claim == key]
        kinds = dict.fromkeys(one.kind for one in mine if one.ours) or {"": None}
        for kind in kinds:
            some = [one for one in mine if one.kind == kind]
            found.append([f"{paper.name}: {claim.claim}", *claim_cells(shown, claim, kind, some)])
        if claim.emulated and (gains := gains_of(shown.emulated, *claim.emulated)):
            found.append([f"{paper.name}: {claim.claim}", *emulated_cells(claim, gains)])
    return found


def emulated_cells(claim: Claim, runs: Sequence[EmulatedGain]) -> list[str]:
    """All but the first column of the row of what was run on emulated devices."""
    above = sum(run.ours.low > 1 for run in runs)
    below = sum(run.ours.high < 1 for run in runs)
    prompts = [run.prompts for run in runs]
    enough = min(prompts) >= rule.ENOUGH
    return [
        "as above",
        claim.regime,
        "emulated: " + ", ".join(f"{with_interval(run.ours)} at c {run.cost:.3g}" for run in runs),
        span(prompts, "g"),
        f"α {span([run.acceptance for run in runs])}, c {span([run.cost for run in runs], '.3g')}, "
        f"devices of their own, at most {span([run.max_tokens for run in runs], 'g')} tokens; "
        f"formulas say {span([run.predicted for run in runs])}",
        f"no paper's pair beside it; the whole interval is above 1 in {above}, "
        f"below 1 in {below} of {len(runs)}",
        "low" if min(prompts) < rule.FEW else "high" if enough else "medium",
    ]


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
        return ", ".join(map(with_interval, values)) + unit
    ends = f"{with_interval(values[0])} to {with_interval(values[-1])}"
    return f"{ends}{unit} ({len(values)} rows)"


def with_interval(ours: Estimate) -> str:
    """A value and the ends of its interval.

    >>> with_interval(Estimate(1.2, 1.1, 1.345))
    '1.20 [1.10, 1.34]'
    """
    return f"{ours.value:.2f} [{ours.low:.2f}, {ours.high:.2f}]"


def regime_words(kind: str, files: Mapping[str, CellFile]) -> str:
    """Acceptance, cost and machine of some cells."""
    alphas = [alpha for file in files.values() if (alpha := acceptance_of(file.measured()))]
    costs = [file.cost for file in files.values() if file.cost is not None]
    cells = [file.measured().cell for file in files.values()]
    assumed = dict.fromkeys(cell.cost_words for cell in cells if cell.kind != "measured")
    cost = f"c {', '.join(assumed) or span(costs)}"
    machines = dict.fromkeys(device_words(file.report.machine) for file in files.values())
    where = f", {' and '.join(machines)}" if kind == "measured" else ""
    tokens = span([file.cell["max_tokens"] for file in files.values()], "g")
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


def paper_page(shown: Shown, paper: Paper, pictures: Mapping[str, Path]) -> str:
    """One paper: its tables, its cells, what is done otherwise and what is open."""
    parts = [
        template("paper").format(paper=paper, page=shown.page, command=command_of(shown, paper)),
        *(f"{text}\n" for text in remarks_on(shown)),
        *sections(shown, paper, pictures, "##"),
        f"![{LOSSES}]({pictures[LOSSES].as_posix()})\n" if LOSSES in pictures else "",
        gain_table(paper) if paper.name == "spide" else "",
        cells_section(shown, paper, "##"),
        paper.appendix,
        *(
            f"## {title}\n\n" + "".join(f"- {text}\n" for text in getattr(paper, name))
            for name, title in LISTS.items()
            if getattr(paper, name)
        ),
    ]
    return "\n".join(filter(None, parts))


def padded_page(shown: Shown) -> str:
    """The page of another padding: the cells that were measured with it."""
    machines = " and ".join(
        sorted({device_words(file.report.machine) for file in shown.files.values()})
    )
    parts = [
        template("padded").format(
            padded=shown.scale.padded, cells=len(shown.files), machines=machines or "none yet"
        ),
        *(f"{text}\n" for text in remarks_on(shown)),
    ]
    for paper in shown.papers:
        if tables := sections(shown, paper, {}, "###"):
            parts.append(f"## {paper.title}\n\nMade by `{command_of(shown, paper)}`.\n")
            parts += [*tables, cells_section(shown, paper, "###", remarks=True)]
    return "\n".join(parts)


def sections(shown: Shown, paper: Paper, pictures: Mapping[str, Path], level: str) -> list[str]:
    """The tables that a page shows."""
    found = []
    for table, rows in shown.compared(paper):
        if table.csv:
            continue
        missing = sorted(
            {
                f"{one.placed.cell}: {shown.failed[one.placed.cell]}"
                for one in rows
                if one.placed.cell in shown.failed
            }
        )
        reasons = dict.fromkeys(one.placed.row.unlike for one in rows if one.placed.row.unlike)
        uneven = dict.fromkeys(f"`{one.placed.cell}` ({one.uneven})" for one in rows if one.uneven)
        parts = [
            f"{level} {table.title}\n\n{table.words}\n"
            if table.words
            else f"{level} {table.title}\n",
            f"Not measured: {'; '.join(missing)}.\n" if missing else "",
            rows_table(rows),
            "".join(f"- {reason}: {paper.reasons[reason]}\n" for reason in reasons),
            f"- uneven profile: pass times with both models at work are not monotone in "
            f"{', '.join(uneven)}: what overlaps there says little.\n"
            if uneven
            else "",
            f"![{table.title}]({pictures[table.title].as_posix()})\n"
            if table.title in pictures
            else "",
        ]
        found.append("\n".join(filter(None, parts)))
    return found


def rows_table(rows: Sequence[Result]) -> str:
    """A table of results; first choices where some method is lossy."""
    shown = [i for i in range(len(ROWS)) if i != LOST or any(one.lost for one in rows)]
    lines = [
        [
            one.placed.label,
            one.placed.row.what,
            number(one.placed.paper, ".2f"),
            with_interval(one.ours) if one.ours else "–",
            one.settings,
            with_interval(one.lost) if one.lost and one.placed.row.metric != "argmax" else "–",
            one.words,
        ]
        for one in rows
    ]
    return markdown([ROWS[i] for i in shown], [[line[i] for i in shown] for line in lines])


def cells_section(shown: Shown, paper: Paper, level: str, *, remarks: bool = False) -> str:
    """Where and on what the cells were measured."""
    cells = shown.cells(paper)
    if not cells:
        return ""
    alphas: dict[str, tuple[float | None, float | None]] = {}
    for placed in (one.placed for _, rows in shown.compared(paper) for one in rows):
        alpha, cost = alphas.get(placed.cell, (None, None))
        alphas[placed.cell] = (placed.alpha or alpha, placed.cost or cost)
    lines = []
    for name, file in cells.items():
        alpha, cost = alphas.get(name, (None, None))
        measured, ids = file.measured(), set(file.report.prompt_ids)
        seeds = f" × {measured.cell.seeds} seeds" if measured.cell.seeds > 1 else ""
        plain = file.report.strategies[REFERENCE].decode_tokens_per_second
        lines.append(
            [
                f"`{name}`",
                measured.cell.pair,
                f"{len(ids)}{seeds}, {(file.report.prompts_digest or '')[:12]}",
                both(acceptance_of(measured), alpha),
                both(file.cost, cost) if file.kind == "measured" else measured.cell.cost_words,
                number(plain if file.kind == "measured" else None, ".1f"),
                (file.report.machine.commit or "unknown")[:9],
                f"{file.seconds / 60:.1f}",
            ]
        )
    machines = Counter(machine_words(file.report.machine) for file in cells.values())
    sources = dict.fromkeys(source_words(file.source) for file in cells.values())
    said = [f"- `{name}`: {text}\n" for name, file in cells.items() for text in file.remarks]
    return (
        f"{level} Cells\n\nOn {'; '.join(machines)}. Prompts: {'; '.join(sources)}. "
        f"{CELLS_WORDS}\n\n"
        f"{markdown(CELLS, lines)}{'' if not remarks else chr(10) + ''.join(said)}"
    )


def both(ours: float | None, theirs: float | None) -> str:
    """Ours, and the paper's in brackets where it is known.

    >>> both(0.512, 0.9), both(0.5, None), both(None, None)
    ('0.51 (0.90)', '0.50', '–')
    """
    return number(ours, ".2f") + ("" if theirs is None else f" ({theirs:.2f})")


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
