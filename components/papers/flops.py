"""SPRINTER's Eq. 5 and 6 on the tokens that were counted here: how much computation its runs save,
and how much when every read counts."""

from __future__ import annotations

from typing import NamedTuple

from draftwell.components.bench.schema import BenchEntry
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.formulas import Flops
from draftwell.components.report.tables import markdown

COLUMNS = (
    "contender",
    "draft tokens",
    "target calls",
    "tokens that the target reads, at most",
    "FLOPs by Eq. 5 or 6, over SD's",
    "FLOPs with all that the target reads, over SD's",
)


class Counts(NamedTuple):
    """Per token of the texts behind each first one.

    Args:
        charged: tokens that the target is charged by Eq. 5 or 6.
        read: tokens that it reads; at most.
    """

    drafted: float
    calls: float
    charged: float
    read: float


def counts_of(entry: BenchEntry) -> Counts:
    """What one contender drafted, and what its target was charged and read.

    SD's target reads each draft and one token more a round, and is charged the drafts (Eq. 5).
    SPRINTER's reads the text, and the flagged tokens that it rejects; what follows its last call,
    and a text without a call, it never reads. It is charged a token a call (Eq. 6).
    """
    rows = entry.per_prompt
    tokens, calls = sum(row.tokens - 1 for row in rows), sum(row.target_calls for row in rows)
    drafted = (
        sum(row.accepted for row in rows) / entry.draft_efficiency
        if entry.draft_efficiency
        else 0.0
    )
    if entry.strategy == "sprinter":
        charged, read = (
            float(calls),
            float(
                sum(row.tokens - 1 + row.judged - row.accepted for row in rows if row.target_calls)
            ),
        )
    else:
        charged, read = drafted, drafted + calls
    return Counts(drafted / tokens, calls / tokens, charged / tokens, read / tokens)


def flops_words(flops: Flops) -> str:
    """What stands above the table."""
    return (
        "Computation (Figures 1 and 9, Table 3), by what was counted here and the FLOPs "
        f"of {flops.models}, where a target pass over a "
        f"token takes {flops.target / flops.draft:.1f} of the draft's and the verifier "
        "none. Counts are per token of the text, SD's "
        "are of its fastest γ; Eq. 5 charges the target nothing for rounds without drafts, "
        "as AdaEDL has them, and Eq. 6 one token "
        "a call:"
    )


def flops_table(file: CellFile, flops: Flops) -> str:
    """A row for each contender that drafts with a model, as Markdown."""
    measured = file.measured()
    counted = {role: counts_of(measured.entry(role)) for role in measured.cell.contenders}
    costs = {
        role: [
            one.drafted * flops.draft + target * flops.target for target in (one.charged, one.read)
        ]
        for role, one in counted.items()
    }
    rows = [
        [
            role,
            *(f"{value:.2f}" for value in (one.drafted, one.calls, one.read)),
            *(f"{mine / base:.2f}" for mine, base in zip(costs[role], costs["SD"], strict=True)),
        ]
        for role, one in counted.items()
    ]
    return markdown(COLUMNS, rows)
