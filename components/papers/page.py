"""The page: every paper's tables next to ours, the formulas, what cannot be tested and what is
open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwell.components.bench.interleaved import REFERENCE
from draftwell.components.papers.asides import asides, curves, device_words, tried
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import PADDED, PLAIN_SHARE, QUICK, Scale
from draftwell.components.papers.comparison import COLUMNS, Result, costs_otherwise, results
from draftwell.components.papers.estimates import losses
from draftwell.components.papers.flops import flops_table, flops_words
from draftwell.components.papers.formulas import run_lengths
from draftwell.components.papers.gain import (
    COLUMNS as GAIN_COLUMNS,
    WORDS as GAIN_WORDS,
    gain_steps,
)
from draftwell.components.papers.points import measured_points
from draftwell.components.papers.predictions import agreement_words, predictions
from draftwell.components.papers.prompts import SHIPPED
from draftwell.components.papers.public import DATA_WORDS, STAND_IN
from draftwell.components.papers.rejections import decades_words, rejections_table
from draftwell.components.papers.roc import roc_table
from draftwell.components.papers.rounds import round_costs, rounds_table
from draftwell.components.papers.tables import Paper, PaperTable
from draftwell.components.papers.trained import trained_table
from draftwell.components.papers.verdicts import OTHERS, RULE, Verdict
from draftwell.components.prompts.overlap import unknown_words
from draftwell.components.report.tables import markdown, number, span

OVERVIEW_WORDS = (
    'Values are counted, and items of the lists "Not in the tables" in the last two '
    "columns. A value that stands beside "
    "two pairs of ours, or is judged in two rows, counts twice."
)
POINT_COLUMNS = (
    "cell",
    "pair",
    "c",
    "acceptance of SD",
    "fastest SD over plain, decoding",
    "its γ",
    "plain decoding, tokens/s",
)
HEADLINE_COLUMNS = ("paper", "headline", "the paper's", "here", "verdicts", "all tables here")
CURVES, ROC, RATIOS, ROUNDS, LOSSES = "-by-tau", "-roc", "-ratios", "-rounds", "-losses"
FURTHER = {
    CURVES: "By τ",
    ROC: "ROC of the verifier",
    RATIOS: "Ratios of rejected tokens",
    ROUNDS: "What a round takes",
    LOSSES: "Speed against first choices of the target",
}
"""What the keys of a table's further pictures end with, and what they show."""
CONFIDENCE = "confidence"
"""Key of the picture of acceptance by confidence, of all pairs on one set of prompts."""
POINTS = "operating-points"
"""Key of the picture of all pairs, which belongs to no table."""
HEADLINE_WORDS = (
    "What each paper's main comparisons came to: how many times as fast, in decoding "
    "alone, lowest to highest. Values are "
    "of the tables with a verdict where there are any; the last column also has those that "
    "cannot be compared with the "
    "paper, for a draft that costs much more or less than there, or for a base that "
    "drifted. SD is vanilla speculative "
    "decoding (DuoDecoding's paper calls it SpS), τ a threshold, equal cores mean that "
    "draft and target have a share of the "
    "cores each. SPRINTER, CSD and PyramidSD are lossy: their tables say what they lose."
)
FORMULA_COLUMNS = (
    "engine",
    "acceptance",
    "γ",
    "c",
    "Leviathan's formula",
    "with measured passes",
    "measured",
    "share reached",
)
FORMULA_WORDS = (
    "Predicted and measured speed over plain decoding with all cores, unless the engine "
    "says otherwise. \"Leviathan's "
    'formula" takes the measured acceptance and c; on equal cores it is multiplied by what '
    "a target pass with all cores "
    'takes over one with a share of them. "Share reached" is measured over "with measured '
    'passes". Acceptance is of the '
    "same texts, so only costs are predicted."
)
ROC_WORDS = (
    "The verifier's scores of the draft's tokens along texts of 64 tokens that the target "
    "draws at the cell's temperature, by "
    "what counts as acceptable; one verifier, trained for λ 1.2 (the paper trains one for "
    "each λ); 95 % intervals over prompts:"
)
TRAINED_WORDS = (
    "Verifiers that were trained for each λ, on two kinds of text, rank the draft's tokens "
    "along texts of 64 tokens that the "
    "target draws from this table's prompts at the cell's temperature; what counts as "
    "acceptable is by the same λ. Features "
    "and penalty are those that cross-validation chose for λ 1.2. The picture below shows "
    "the first row's curves. 95 % "
    "intervals over prompts:"
)
REJECTION_WORDS = (
    "The ten most frequent pairs of a rejected token and the one in its place, with "
    "p(draft's token) / p(target's token) by "
    "the target at temperature 1:"
)
ROUND_WORDS = (
    "Here, the milliseconds of a round (a target pass after the prompt was read), split by "
    "which model was computing (the rest "
    "is all that is outside passes), with the tokens drafted in it and those that it added "
    "to the text:"
)
KNOWN_UNKNOWN = unknown_words(["distilled_draft"])
"""Of the source of prompts: what `DATA_WORDS` says for all tables."""
SPIDE_WORDS = (
    "SPIDE over SD is predicted text by text: Algorithm 1 and SD's rounds with passes as "
    "they were measured, a token's chance "
    "of acceptance as in that text, and no draft beyond the text's end."
)


def render(
    papers: Sequence[Paper],
    scale: Scale,
    cells: Mapping[str, CellFile],
    failed: Mapping[str, str] | None = None,
    pictures: Mapping[str, Path] | None = None,
) -> str:
    """The whole page as Markdown.

    Args:
        cells: name → measured cell.
        failed: name → reason of cells that could not be measured.
        pictures: table's name, or one of the keys above → picture, as the page addresses it.
    """
    if scale.pad_target != PADDED:
        return render_padded(papers, scale, cells, failed or {}, pictures or {})
    compared = {
        table.name: results(table, cells.get(table.cell.name))
        for paper in papers
        for table in paper.tables(scale)
    }
    summaries = [
        f"{text}\n" for paper in papers if paper.summary and (text := paper.summary(cells))
    ]
    parts = [
        opening(scale, cells),
        headlines(papers, scale, compared),
        *summaries,
        how_it_is_made(scale, cells),
        how_to_read(cells),
    ]
    parts += [
        overview(papers, scale, compared),
        operating_points(papers, scale, cells, (pictures or {}).get(POINTS)),
        DATA_WORDS,
    ]
    for paper in papers:
        parts.append(f"## {paper.title}\n")
        parts.append(
            f"{paper.citation}{'. ' if paper.citation else ''}Made by "
            f"`{command_of(paper, scale, cells)}`.\n"
        )
        shared = shared_words(paper.tables(scale))
        parts += bullets(shared)
        for table in paper.tables(scale):
            parts.append(
                section(
                    table,
                    compared[table.name],
                    cells.get(table.cell.name),
                    (failed or {}).get(table.cell.name),
                    pictures or {},
                    command_of(paper, scale, cells, table.cell.name),
                    shared,
                )
            )
        parts.append(closing(paper, cells))
    return "\n".join(parts)


def render_padded(
    papers: Sequence[Paper],
    scale: Scale,
    cells: Mapping[str, CellFile],
    failed: Mapping[str, str],
    pictures: Mapping[str, Path],
) -> str:
    """The page of another padding: the tables whose cells were measured or failed with it; what no
    padding changes is on the usual page."""
    shown = [
        (paper, [table for table in paper.tables(scale) if table.cell.name in {*cells, *failed}])
        for paper in papers
    ]
    counts = (
        sum(len(tables) for _, tables in shown),
        sum(len(paper.tables(scale)) for paper in papers),
    )
    machines = (
        " and ".join(sorted({device_words(file.report.machine) for file in cells.values()}))
        or "no machine yet"
    )
    parts = [
        f"# The papers' tables with targets padded to {scale.padded}\n\n"
        f"{counts[0]} of the {counts[1]} measured tables, on {machines}. A target is "
        "SmolLM2-135M padded with zeros until its passes "
        f"cost what those of a model of {scale.padded} do; it writes what it wrote before. "
        "Pairs named `near-copy` draft with the "
        "target itself, with fewer layers. How verdicts, intervals and columns are to be "
        "read, deviations, counted tables and what is "
        "open: [the tables with the usual "
        "padding](https://github.com/draftwell/draftwell/blob/main/docs/papers.md). Where "
        "a table "
        "says equal cores (`@1+1`), on a GPU each model has a worker thread and a CUDA "
        "stream of its own, on the same card.\n",
        *remarks_on(scale, cells),
        operating_points(papers, scale, cells, pictures.get(POINTS)),
    ]
    for paper, tables in shown:
        shared = shared_words(tables)
        if tables:
            parts += [
                f"## {paper.title}\n",
                f"Made by `{command_of(paper, scale, cells)}`.\n",
                *bullets(shared),
            ]
        for table in tables:
            file = cells.get(table.cell.name)
            parts.append(
                section(
                    table,
                    results(table, file),
                    file,
                    failed.get(table.cell.name),
                    pictures,
                    command_of(paper, scale, cells, table.cell.name),
                    shared,
                )
            )
    return "\n".join(parts)


def shared_words(tables: Sequence[PaperTable]) -> dict[str, list[str]]:
    """Of which of a paper's tables → what would stand under several of them, and stands once ahead
    of all."""
    found = {}
    for kind, counted in (("Measured tables", False), ("Counted tables", True)):
        some = [table for table in tables if (table.cell.replay is not None) == counted]
        counts = Counter(text for table in some for text in (table.why, *table.notes))
        if any(count > 1 for count in counts.values()):
            found[kind] = [text for text, count in counts.items() if count > 1]
    return found


def bullets(shared: Mapping[str, Sequence[str]]) -> list[str]:
    """As lists."""
    return [
        f"{kind}:\n\n" + "".join(f"- {text}\n" for text in texts) for kind, texts in shared.items()
    ]


def remarks_on(scale: Scale, cells: Mapping[str, CellFile]) -> list[str]:
    """Paragraphs that qualify a whole page: on the size of the run, and on shipped prompts."""
    stand_in = any(SHIPPED in file.source for file in cells.values())
    return [f"{text}\n" for text in (scale.remark, STAND_IN if stand_in else "") if text]


def command_of(paper: Paper, scale: Scale, cells: Mapping[str, CellFile], cell: str = "") -> str:
    """The command that measures a paper's tables, or one cell of it, as what is there was
    measured."""
    names = [
        name
        for name in (cell, *(table.cell.name for table in paper.tables(scale)))
        if name in cells
    ]
    machine = cells[names[0]].report.machine if names else None
    quick = " --set quick=true" if scale.name == QUICK.name else ""
    device = (machine.device or "cpu").partition(":")[0] if machine else ""
    options = (
        f" --set dtype={machine.dtype} --set device={device} --set threads={machine.threads}"
        if machine
        else ""
    )
    return (
        f"draftwell reproduce papers{quick} --set only={paper.name} --data "
        f"data{options}{scale.pad_option}{f' --set cell={cell}' if cell else ''}"
    )


def opening(scale: Scale, cells: Mapping[str, CellFile]) -> str:
    """What the page is, and in what setting its verdicts hold."""
    counted = sum(1 for file in cells.values() if file.cell.get("replay"))
    return (
        "# The papers' tables, run here\n\n"
        "This page puts the values of five papers beside ours. A cell is one benchmark "
        "run: one pair of models, one set of prompts, "
        f"several methods. {len(cells) - counted} cells are measured; {counted} are "
        "counted by replay of the methods on recorded "
        "texts, which gives exact counts and no times. Each table names its commit. A "
        "verdict is about this setting: a target of 135 M "
        f"parameters that is padded to the cost of {scale.padded}, CPU cores that share "
        "one memory, a few prompts, and answers of at "
        f'most {scale.max_tokens} tokens (SPRINTER\'s 20). "Not reproduced" does not say '
        "that a paper is wrong on its own hardware. "
        "Three tables were also measured [on a "
        "GPU](https://github.com/draftwell/draftwell/blob/main/docs/papers-gpu.md).\n\n"
        + "".join(f"{text}\n" for text in remarks_on(scale, cells))
    )


def how_it_is_made(scale: Scale, cells: Mapping[str, CellFile]) -> str:
    """How to run it."""
    minutes = sum(file.seconds for file in cells.values()) / 60
    return (
        "**Made by** `make papers DATA=data`, sized for six hours on two cores and "
        "resumable cell by cell: what is interrupted loses "
        'the cell that it was in, up to an hour. `make papers FLAGS="--set quick=true"` is '
        "sized for "
        "20 minutes. `data` is a folder that holds "
        "the data sets below, at any depth. A full run on them writes this page; "
        "`draftwell reproduce papers` by itself writes into "
        "`$DRAFTWELL_HOME/papers` unless `page` says otherwise. "
        f"These cells (a {scale.name} run) took {minutes:.0f} minutes. A fresh clone shows "
        "the cells that the project keeps "
        "(`docs/measured`); a run of your own takes their place, cell by cell.\n"
    )


def headlines(
    papers: Sequence[Paper], scale: Scale, compared: Mapping[str, Sequence[Result]]
) -> str:
    """What each paper's main comparisons came to: over tables with a verdict on them, or over all
    where none has one; empty without any."""
    rows = []
    for paper in papers:
        for headline in paper.headlines:
            shown = [
                result
                for table in paper.tables(scale)
                for result in compared[table.name]
                if result.what == headline.row
            ]
            known = [result for result in shown if result.ours is not None]
            found = [
                result for result in known if result.verdict != Verdict.NOT_COMPARABLE
            ] or known
            theirs, ours = (
                [one.paper for one in found if one.paper is not None],
                [one.ours.value for one in found if one.ours],
            )
            verdicts = Counter(str(one.verdict) for one in found)
            if found:
                every = span([one.ours.value for one in known if one.ours])
                rows.append(
                    [
                        paper.name,
                        headline.what,
                        span(theirs),
                        span(ours),
                        ", ".join(f"{name} {count}" for name, count in verdicts.items()),
                        f"{every} ({len(known)})",
                    ]
                )
    return f"{HEADLINE_WORDS}\n\n{markdown(HEADLINE_COLUMNS, rows)}\n" if rows else ""


def how_to_read(cells: Mapping[str, CellFile]) -> str:
    """What stands in the tables, and the rule of verdicts."""
    return (
        "**Models.** The target is SmolLM2-135M-Instruct (30 layers, weights from a Q4_1 "
        "GGUF file, computed in the cell's number "
        "format). Zeros pad it (`pad_target`) until its passes cost what those of a "
        "larger model do; padding changes no output. "
        "`smollm2-135m` drafts with a distilled model of 4 layers whose head covers 8,192 "
        "tokens. `near-copy-N` drafts with N of the "
        "target's own layers, `near-copy-int8` with its weights rounded to 8 bits: they "
        "stand in the place of large models of one "
        "family. In SPIDE's tables each pair of ours stands beside the paper's of nearest "
        "acceptance. In the others it is the pair "
        "that we have, and accepts much less where the paper's rate can be computed, which "
        "stands below each table.\n\n"
        "**Equal cores** (`@1+1`): each model has a share of the cores, in serial "
        "strategies too; measured plain decoding has all of "
        'them. Rows "over plain, equal cores" divide by plain decoding on the target\'s '
        "share, which is computed from timed passes "
        f"and never run{plain_share_span(cells)}. **Values** are ratios unless a row says "
        "otherwise, and **intervals** are 90 % "
        "bootstrap intervals over prompts. Where a paper prints no ratio, its value is "
        "computed from the values that it prints, "
        "rounded to two digits. **MAT**, as in SPIDE's paper, is accepted draft tokens "
        "divided by tokens that are sampled from the "
        "target after a draft (corrections and bonus tokens), not tokens per target call. "
        "A **first choice** is the target's most "
        "likely token. More terms: "
        "[glossary](https://github.com/draftwell/draftwell/blob/main/docs/glossary.md).\n\n"
        f"{memory_of_the_machine(cells)}"
        "**Speeds are of decoding alone**, after the first token: the target's reading of "
        f"the prompt{reading_share(cells)} weighs "
        "more in these short answers than in most papers', which have hundreds of tokens, "
        "on GPUs. The draft model reads its prompt "
        "after the first token, so its reading counts, except with PEARL and DuoDecoding, "
        "which draft before it: their decoding "
        'lacks that reading and the first draft. The column "whole request" has all of it. '
        "CSD's paper calls its speeds "
        "end-to-end and SPIDE's walltime; none says whether the prompt is in them.\n\n"
        "**Settings** are those of the fastest contender of each role; what else was tried "
        "stands under each table.\n\n"
        f"**The rule of verdicts:**\n\n{RULE}{OTHERS}"
    )


def plain_share_span(cells: Mapping[str, CellFile]) -> str:
    """What a token of plain decoding on the target's share takes, least to most; empty where that
    was not timed."""
    found = [
        pace * 1e3 for file in cells.values() if (pace := file.measured().plain_share) is not None
    ]
    return f" ({min(found):.0f} to {max(found):.0f} ms a token in these cells)" if found else ""


def memory_of_the_machine(cells: Mapping[str, CellFile]) -> str:
    """What a shared machine's memory does to rows over plain decoding."""
    measured = [file for file in cells.values() if not file.cell.get("replay")]
    between = sum(1 for file in measured if file.passes_timed)
    paces = [
        1e3 / pace
        for file in measured
        if (pace := file.report.strategies[REFERENCE].decode_tokens_per_second)
    ]
    spread = (
        f", and plain decoding took {min(paces):.0f} to {max(paces):.0f} ms a token in these cells"
        if paces
        else ""
    )
    return (
        "**Intervals do not cover the state of the machine.** On a shared machine the rate "
        "at which all cores together read memory drops to little more than half for seconds at "
        "a time, probably because of other guests; computing stays as fast. On two cores a "
        "target pass over one token takes some 45 ms at best and 70 ms then, one over eight "
        f"tokens 73 and 80{spread}: so slow moments favour speculation over plain decoding (and "
        "count against it in rows over plain, equal cores, whose base is a constant). "
        "`csd-maths`, measured twice, differed by 11 to 27 % in rows over plain, and in two "
        "verdicts; `pyramidsd-choice`, measured again, moved by 31 % over plain and by up to "
        "20 % in ratios to SD. So **verdicts of rows over plain are provisional** where a cell "
        "was measured on a CPU. Counts do not depend on memory (but DuoDecoding's do, whose "
        f"draft length follows the times of passes). In {between} of the {len(measured)} "
        "measured cells here passes were timed between texts. Where a role has several "
        "settings, the fastest may be another one in the next run.\n\n"
    )


def reading_share(cells: Mapping[str, CellFile]) -> str:
    """The part of whole requests in which the target reads the prompt, least to most, in brackets;
    empty where nothing was measured."""
    entries = [
        entry.per_prompt
        for file in cells.values()
        if not file.cell.get("replay")
        for entry in file.report.strategies.values()
    ]
    shares = [
        sum(row.ttft_ms for row in rows) / 1e3 / sum(row.seconds for row in rows)
        for rows in entries
        if rows
    ]
    return f" ({min(shares):.0%} to {max(shares):.0%} of a request here)" if shares else ""


def overview(
    papers: Sequence[Paper], scale: Scale, compared: Mapping[str, Sequence[Result]]
) -> str:
    """How many values of each paper got which verdict."""
    kinds = list(Verdict)
    rows = []
    for paper in papers:
        counts = Counter(
            result.verdict for table in paper.tables(scale) for result in compared[table.name]
        )
        counts[Verdict.UNTESTABLE] += len(paper.untestable)
        counts[Verdict.OPEN] += len(paper.open)
        rows.append([paper.name, *(str(counts[kind]) for kind in kinds)])
    return markdown(("paper", *map(str, kinds)), rows) + f"\n{OVERVIEW_WORDS}\n"


def operating_points(
    papers: Sequence[Paper], scale: Scale, cells: Mapping[str, CellFile], picture: Path | None
) -> str:
    """Acceptance against cost of the pairs that were measured, by SD on each set of prompts."""
    rows = [
        [
            name,
            point.pair,
            f"{point.c:.3f}",
            f"{point.acceptance:.2f}",
            number(point.speed, ".2f"),
            point.settings.removeprefix("γ "),
            number(point.plain, ".1f"),
        ]
        for name, point in measured_points(papers, scale, cells).items()
    ]
    if not rows:
        return ""
    text = (
        "## Where our pairs are\n\nA draft's cost c is its pass over the target's, both "
        "over one token and, like SD here, with all "
        f"cores. All targets are padded (`pad_target`).\n\n{markdown(POINT_COLUMNS, rows)}"
    )
    return text + (f"\n![Acceptance against cost]({picture.as_posix()})\n" if picture else "")


def section(
    table: PaperTable,
    compared: Sequence[Result],
    file: CellFile | None,
    failure: str | None,
    pictures: Mapping[str, Path],
    command: str,
    shared: Mapping[str, Sequence[str]],
) -> str:
    """One table with the formulas of its cell.

    Args:
        command: measures it.
        shared: as by `shared_words`.
    """
    missing = f" Not measured: {failure}." if failure else "" if file else " Not measured yet."
    source = f"; {source_words(file.source)}" if file else ""
    said = {text for texts in shared.values() for text in texts}
    own = [text for text in (table.why, *table.notes) if text not in said]
    words = " ".join(
        [*own, *filter(None, (acceptance_words(table, file), runs_words(table, file)))]
    )
    words += f"\n\n{asides(file)}" if file else ""
    text = (
        f"### {table.title}\n\nPaper: {table.theirs}. Ours: {table.ours}{source}.{missing} "
        "To run only "
        f"this table: `{command}`.\n\n"
        f"{markdown(COLUMNS, [result.cells() for result in compared])}\n{words}\n"
    )
    steps = gain_steps(file, table.pair) if file and table.pair and table.formulas else []
    text += (
        f"\n{GAIN_WORDS}\n\n{markdown(GAIN_COLUMNS, [[what, f'{value:.2f}'] for what, value in steps])}"  # noqa: E501
        if steps
        else ""
    )
    rows = predictions(file) if file and table.formulas else []
    if rows and file:
        words = " ".join((FORMULA_WORDS, *drift_words(table, file), timed_words(file.passes_timed)))
        text += f"\n{words}\n\n{markdown(FORMULA_COLUMNS, [row.cells() for row in rows])}"
        text += f"\n{agreement_words(rows)}{f' {SPIDE_WORDS}' if any(row.over for row in rows) else ''}\n"  # noqa: E501
    text += f"\n{tried(file)}" if file else ""
    text += further_tables(table, file) if file else ""
    shown = [
        (table.name, table.title),
        *((table.name + end, title) for end, title in FURTHER.items()),
    ]
    for key, title in (
        [*shown, (CONFIDENCE, "Acceptance by confidence, of all pairs")]
        if table.confidence
        else shown
    ):
        text += f"\n![{title}]({pictures[key].as_posix()})\n" if key in pictures else ""
    return text


def further(table: PaperTable, file: CellFile) -> dict[str, Any]:
    """End of a key of `FURTHER` → what its picture is drawn from; empty where there is nothing to
    show."""
    return {
        CURVES: curves(file),
        ROC: file.roc,
        RATIOS: file.rejections,
        ROUNDS: round_costs(file) if table.rounds else {},
        LOSSES: losses(file.measured(), table.rows),
    }


def drift_words(table: PaperTable, file: CellFile) -> list[str]:
    """A sentence where plain decoding took another time in the texts than its passes did, and what
    that makes of the table."""
    if file.drift is None:
        return []
    measured, expected = file.drift
    where = (
        "in the texts than in the passes between them"
        if file.passes_timed
        else "in the texts than when passes were timed"
    )
    unjudged = (
        ", and rows over plain, equal cores, get no verdict"
        if any(row.against == PLAIN_SHARE for row in table.rows)
        else ""
    )
    return [
        f"The machine was {'slower' if measured > expected else 'faster'} {where}: plain "
        f"decoding took {measured * 1e3:.0f} ms a "
        f"token, by its passes {expected * 1e3:.0f} ms, so predictions are off by as "
        f"much{unjudged}."
    ]


def timed_words(times: int) -> str:
    """When the passes of predictions were timed.

    >>> timed_words(4)
    'Passes were timed 4 times between the texts:'
    """
    return (
        f"Passes were timed {times} times between the texts:"
        if times
        else "Passes were timed once, before the texts:"
    )


def further_tables(table: PaperTable, file: CellFile) -> str:
    """What a cell has besides its rows: a verifier's ROC, rejected pairs, the parts of a round."""
    text = ""
    if file.aucs:
        text += f"\n{TRAINED_WORDS}\n\n{trained_table(file.aucs, file.roc)}"
    elif file.roc:
        text += f"\n{ROC_WORDS}\n\n{roc_table(file.roc)}"
    if file.rejections:
        text += f"\n{REJECTION_WORDS}\n\n{rejections_table(file.rejections)}\n{decades_words(file.rejections)}\n"  # noqa: E501
    if table.flops:
        text += f"\n{flops_words(table.flops)}\n\n{flops_table(file, table.flops)}"
    if table.rounds:
        parts = rounds_table(file)
        text += (
            f"\n{table.rounds} {ROUND_WORDS}\n\n{parts}"
            if parts
            else f"\n{table.rounds} Not measured yet.\n"
        )
    return text


def acceptance_words(table: PaperTable, file: CellFile | None) -> str:
    """Both acceptance rates, where they are known."""
    if table.acceptance is None or file is None or "SD" not in table.cell.contenders:
        return ""
    ours = file.measured().entry("SD").acceptance_rate
    theirs = f"the paper's {table.acceptance:.2f} ({table.acceptance_from})"
    cost = (
        ""
        if table.cost is None or file.cost is None
        else (
            " What a draft pass costs next to a target pass, both over one token: the "
            f"paper's at most {table.cost:.2f}, here "
            f"{file.cost:.2f}{', more than a factor of two apart, so speeds get no verdict' if costs_otherwise(table, file) else ''}."  # noqa: E501
        )
    )
    return (
        ""
        if ours is None
        else (
            f"Acceptance rate of SD: {theirs}, here {ours:.2f} (accepted / judged by the "
            f"target).{cost}"
        )
    )


def runs_words(table: PaperTable, file: CellFile | None) -> str:
    """What MAT over SD's would be by the acceptance rates alone, of SPIDE's counted tables; empty
    of others."""
    if table.pair is None or table.formulas or file is None:
        return ""
    ours = (
        file.measured()
        .entries[table.cell.label_of(f"vanilla_sd:num_speculative_tokens={table.pair.gamma}")]
        .acceptance_rate
    )
    if not ours or ours >= 1:
        return ""
    values = [run_lengths(alpha, table.pair.gamma) for alpha in (table.pair.alpha, ours)]
    return (
        "With tokens that are accepted independently, MAT over SD's at γ "
        f"{table.pair.gamma} is 1 / (1 − α^γ) where nothing cuts "
        f"drafts short: {values[0]:.2f} at the paper's acceptance, {values[1]:.2f} at "
        "ours; where acceptance is correlated along the "
        "text, both are more."
    )


def source_words(source: str) -> str:
    """Where prompts come from; that an artifact's training prompts are unknown is said once, for
    all tables."""
    return "; ".join(part for part in source.split("; ") if part != KNOWN_UNKNOWN)


def closing(paper: Paper, cells: Mapping[str, CellFile]) -> str:
    """Deviations, what follows from the paper's own figures, what was found by other means, what
    cannot be tested, what is open."""
    lines = [f"- {text}" for text in paper.deviations]
    text = "### Deviations\n\n" + "\n".join(lines) + "\n" if lines else ""
    text += f"\n{paper.appendix(cells)}" if paper.appendix else ""
    lines = [f"- {what}: {how}." for what, how in paper.inconsistencies]
    text += (
        "\n### Inconsistencies and arithmetic in the paper\n\n" + "\n".join(lines) + "\n"
        if lines
        else ""
    )
    lines = [f"- {what}: {result}." for what, result in paper.elsewhere]
    text += "\n### Measured by other means\n\n" + "\n".join(lines) + "\n" if lines else ""
    lines = [f"- {what}: not testable here: {why}." for what, why in paper.untestable] + [
        f"- {what}: open." for what in paper.open
    ]
    return text + ("\n### Not in the tables\n\n" + "\n".join(lines) + "\n" if lines else "")
