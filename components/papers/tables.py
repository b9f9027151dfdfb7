"""What a paper reports, as data, and what is run here in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from draftwell.components.papers.cells import PLAIN, Cell, Scale
from draftwell.components.papers.formulas import Flops

Metric = Literal[
    "speed",
    "calls",
    "mat",
    "acceptance",
    "efficiency",
    "argmax",
    "rouge_1",
    "rouge_2",
    "rouge_l",
    "rouge_l_ratio",
    "wins",
    "accuracy",
    "ttft",
    "one_kept",
    "one_lost",
    "several_kept",
    "several_lost",
]
"""Of `estimates.Measured.estimate`; `speed` is of decoding alone, from the first token on; the last
four are shares of DuoDecoding's rounds: one or several sequences, and whether the first one's first
token was kept."""

ROUGE: dict[str, Metric] = {"ROUGE-1": "rouge_1", "ROUGE-2": "rouge_2", "ROUGE-L": "rouge_l"}
"""Name → metric."""


@dataclass(frozen=True)
class Row:
    """One value of a paper.

    Args:
        what: in words.
        paper: its value; None where it has none and ours is shown alone.
        metric: what is measured here.
        role: of the cell's contenders; or the spec of one of them, where a setting is the paper's
            and not the fastest.
        against: the role (or `PLAIN_SHARE`) that it is divided by (or that is subtracted from it,
            `argmax`, `rouge_…` and `accuracy`; or that it is compared with prompt by prompt,
            `wins`); None: the metric by itself.
        neutral: the value at which there is no effect: the paper's side of it is the direction;
            None: there is no such value.
        comparable: whether ours is measured as the paper's is; where not, there is no verdict, and
            the table's `notes` say why.
        flattered: whether ours is higher than it would be if measured as the paper's is: only what
            is not reproduced even so gets a verdict.
    """

    what: str
    paper: float | None
    metric: Metric
    role: str
    against: str | None = None
    neutral: float | None = 1.0
    comparable: bool = True
    flattered: bool = False


EQUAL_PLAIN = (
    'Rows "over plain, equal cores" compare with plain decoding on the target\'s share of '
    "the cores, as the paper runs it on "
    "the target's GPUs. It is not run: a token takes what a pass over one token takes on "
    "that share, timed "
    "with the pair's passes, and the time outside passes. How that timing varies is not in "
    "the interval, and no whole request "
    "can be given. Over measured plain decoding, with all cores, contenders stand in the "
    'table "Every contender".'
)
"""Under tables with such rows."""


def drafts_early(method: str, base: str) -> str:
    """Under tables with a strategy that drafts beside the target's reading of the prompt: what that
    does to its decoding alone."""
    return (
        f"{method} drafts while the target reads the prompt, so its decoding alone lacks "
        "the draft model's reading and the first "
        f'draft, which {base}\'s has: in the row "{method}: speed over {base}", whole '
        "requests compare both in full, and rows of its "
        "decoding get a verdict only where they are not reproduced even so."
    )


@dataclass(frozen=True)
class Headline:
    """A row of the page's first table: what several tables of a paper say of one comparison.

    Args:
        what: in words.
        row: `Row.what` of the rows that it is of.
    """

    what: str
    row: str


def quality_rows(*roles: str) -> tuple[Row, ...]:
    """For lossy strategies, next to their speed: how many more of their tokens are the target's
    first choice than of plain decoding's.

    Ours only: the papers judge quality by answers, which this target is too small for.
    """
    return tuple(
        Row(
            (
                f"{role}: share of tokens that are the target's first choice, minus plain's "
                "(ours only)"
            ),
            None,
            "argmax",
            role,
            PLAIN,
            neutral=0.0,
        )
        for role in roles
    )


def overlap_rows(role: str, against: str, *, judged: float | None = None) -> tuple[Row, ...]:
    """For strategies that the paper judges by their answers: words in common with the reference, by
    ROUGE.

    Args:
        judged: the paper's share of answers that a judge finds as good as the other's, or better.
    """
    less = [
        Row(
            f"{role}: {name} minus {against}'s, points, 0 to 100 (ours only)",
            None,
            metric,
            role,
            against,
            neutral=0.0,
        )
        for name, metric in ROUGE.items()
    ]
    return (*less, wins_row(role, against, judged))


def wins_row(role: str, against: str, judged: float | None = None) -> Row:
    """How often its answer has as many words in common with the reference as the other's, or more;
    `judged` as in `overlap_rows`."""
    return Row(
        f"{role}: share of answers not worse than {against}'s (here by ROUGE-L)",
        judged,
        "wins",
        role,
        against,
        neutral=None,
        comparable=False,
    )


@dataclass(frozen=True)
class PublishedPair:
    """A pair of SPIDE's paper on one data set.

    Args:
        alpha: chance that SD accepts a token.
        gamma: SD's draft length.
        tau: SPIDE's threshold.
        ratio: s, draft passes in a target pass, rounded down.
        sd_share: its SD's speed over Leviathan's formula.
        gain: SPIDE's speed over SD's.
    """

    alpha: float
    gamma: int
    tau: float
    ratio: int
    sd_share: float
    gain: float


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper, or a part of it, and the cell that stands for it.

    Args:
        name: key of its pictures and its heading's end.
        title: the paper's number and what it is.
        theirs, ours: what was run there, and here.
        why: one sentence: why values agree or differ.
        acceptance: chance that SD accepts a token in the paper, where it can be taken from its
            tables.
        acceptance_from: how it is taken from them, in words.
        notes: sentences under it, such as why rows have no verdict.
        cost: c in the paper, a draft pass over a target pass, at most.
        formulas: whether SD's rows get Leviathan's formula next to them, SPIDE's its prediction,
            and SD's fastest is an operating point.
        aucs: λ → the paper's area under the ROC curve of a verifier whose label it is.
        rounds: what the paper says of a round's parts, a sentence above ours; empty: its rounds are
            not shown.
        confidence: bin of `AcceptanceTable` → the share of its draft tokens that the paper's target
            keeps.
        flops: of models whose computation is counted by SPRINTER's equations.
        pair: of SPIDE's tables, the paper's pair: what its gain comes from is set beside ours.
    """

    name: str
    title: str
    theirs: str
    ours: str
    cell: Cell
    rows: tuple[Row, ...]
    why: str
    acceptance: float | None = None
    acceptance_from: str = ""
    notes: tuple[str, ...] = ()
    cost: float | None = None
    formulas: bool = True
    aucs: Mapping[str, float] = field(default_factory=dict)
    rounds: str = ""
    confidence: Mapping[int, float] = field(default_factory=dict)
    flops: Flops | None = None
    pair: PublishedPair | None = None


@dataclass(frozen=True)
class Paper:
    """One paper.

    Args:
        name: as the setting `only` takes it.
        citation: the paper's title and authors.
        tables: its tables in a run of a size.
        untestable: (what, reason) of what cannot be tested here.
        open: what could be run here and is not yet.
        deviations: what is done otherwise than in the paper.
        elsewhere: (what, result) of what was measured or counted here by other means than this
            command.
        inconsistencies: (what, how) of values that differ within the paper, or follow from others
            of it by arithmetic.
        headlines: what the page begins with.
        summary: makes a sentence that follows the headlines, of the measured cells (name →
            `CellFile`); empty where it has nothing to say.
        appendix: makes Markdown under its tables, of the measured cells (name → `CellFile`): what
            follows from the paper's own figures, and ours next to them.
    """

    name: str
    title: str
    tables: Callable[[Scale], tuple[PaperTable, ...]]
    citation: str = ""
    untestable: tuple[tuple[str, str], ...] = ()
    open: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    elsewhere: tuple[tuple[str, str], ...] = ()
    inconsistencies: tuple[tuple[str, str], ...] = ()
    headlines: tuple[Headline, ...] = ()
    summary: Callable[[Mapping[str, Any]], str] | None = None
    appendix: Callable[[Mapping[str, Any]], str] | None = None


def without_replayed(paper: Paper) -> Paper:
    """A paper without the tables that are counted by replay: padding a target changes no count."""
    return replace(
        paper,
        tables=lambda scale: tuple(
            table for table in paper.tables(scale) if table.cell.replay is None
        ),
    )
