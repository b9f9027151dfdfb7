"""SPRINTER's Eq. 5 and 6 on the tokens that were counted here: how much computation its runs save, and how much when every read counts."""

from __future__ import annotations

from typing import NamedTuple

from components.bench.schema import BenchEntry
from components.papers.cell_file import CellFile
from components.papers.formulas import Flops
from components.report.tables import markdown

COLUMNS = ("contender", "draft tokens", "target calls", "tokens that the target reads", "FLOPs by Eq. 5 or 6, over SD's",
           "FLOPs with all that the target reads, over SD's")


class Counts(NamedTuple):
    """Per token of the texts behind each first one."""

    drafted: float
    calls: float
    read: float


def counts_of(entry: BenchEntry, *, trusts: bool) -> Counts:
    """What one contender drafted, and what its target read.

    Args:
        trusts: whether tokens stay without the target's judgement: it then reads them later, as a part of the text; at least once each.
    """
    tokens, accepted = (sum(column) for column in zip(*((row.tokens - 1, row.accepted) for row in entry.per_prompt), strict=True))
    calls = sum(row.target_calls for row in entry.per_prompt)
    drafted = accepted / entry.draft_efficiency if entry.draft_efficiency else 0.0
    read = max(tokens, calls) if trusts else drafted + calls
    return Counts(drafted / tokens, calls / tokens, read / tokens)


def equations(counts: Counts, flops: Flops, *, trusts: bool) -> float:
    """FLOPs of a token of the text by Eq. 5, or by Eq. 6, which charges the target one token a call."""
    return counts.drafted * flops.draft + (counts.calls if trusts else counts.drafted) * flops.target


def in_full(counts: Counts, flops: Flops) -> float:
    """The same with every token that the target reads."""
    return counts.drafted * flops.draft + counts.read * flops.target


def flops_words(flops: Flops) -> str:
    """What stands above the table."""
    return (f"Computation (Figures 1 and 9, Table 3), by what was counted here and the FLOPs of {flops.models}, where a target pass over a "
            f"token takes {flops.target / flops.draft:.1f} of the draft's, the verifier none; all per token of the text:")


def flops_table(file: CellFile, flops: Flops) -> str:
    """A row for each contender that drafts with a model, as Markdown."""
    measured = file.measured()
    roles = {role: measured.entry(role) for role in measured.cell.contenders}
    counted = {role: counts_of(entry, trusts=trusts(entry)) for role, entry in roles.items()}
    base = counted["SD"]
    rows = []
    for role, counts in counted.items():
        by_equation = equations(counts, flops, trusts=trusts(roles[role])) / equations(base, flops, trusts=False)
        rows.append([role, f"{counts.drafted:.2f}", f"{counts.calls:.2f}", f"{counts.read:.2f}", f"{by_equation:.2f}",
                     f"{in_full(counts, flops) / in_full(base, flops):.2f}"])
    return markdown(COLUMNS, rows)


def trusts(entry: BenchEntry) -> bool:
    """Whether a verifier lets tokens stay."""
    return entry.strategy == "sprinter"
