"""What a round of each contender takes, part by part, and how many tokens it works on
(DuoDecoding's and CSD's Figures 4), and what a pass of each of three models takes.
"""

from __future__ import annotations

from typing import NamedTuple

from draftwell.components.bench.schema import BenchEntry
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.estimates import drafts_first
from draftwell.components.report.tables import markdown, number

COLUMNS = (
    "contender",
    "ms",
    "draft alone",
    "target alone",
    "qualifier",
    "both at once",
    "rest",
    "tokens drafted",
    "tokens written",
)


class RoundCost(NamedTuple):
    """Means over the rounds of all texts; a round is a target pass after the prompt was read.

    Args:
        seconds: part of `BenchEntry.time_share` → seconds; the reading of prompts is left out.
        drafted: draft tokens.
        written: tokens that the text grew by; both None of strategies that draft first, whose
            counts have the prompt's own draft.
    """

    seconds: dict[str, float]
    drafted: float | None
    written: float | None

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return sum(self.seconds.values())


def round_cost(entry: BenchEntry) -> RoundCost | None:
    """What a round of one contender takes; None where its time was not taken apart, or nothing was
    decoded."""
    # passes over a prompt that judge a draft as well
    reading = len(entry.per_prompt) if drafts_first(entry) else 0
    calls = sum(row.target_calls for row in entry.per_prompt) - reading
    if not entry.time_share or calls <= 0:
        return None
    wall = sum(row.seconds for row in entry.per_prompt)
    seconds = {
        name: (share or 0.0) * wall / calls
        for name, share in entry.time_share.items()
        if name != "prefill"
    }
    if reading:
        return RoundCost(seconds, None, None)
    accepted = sum(row.accepted for row in entry.per_prompt)
    drafted = accepted / entry.draft_efficiency if entry.draft_efficiency else 0.0
    return RoundCost(
        seconds, drafted / calls, sum(row.tokens - 1 for row in entry.per_prompt) / calls
    )


def round_costs(file: CellFile) -> dict[str, RoundCost]:
    """Role → what a round of its fastest contender takes, of those whose time was taken apart."""
    measured = file.measured()
    costs = {role: round_cost(measured.entry(role)) for role in measured.labels}
    return {role: cost for role, cost in costs.items() if cost is not None}


def rounds_table(file: CellFile) -> str:
    """A row for each of these roles, as Markdown; empty where there is none."""
    found = round_costs(file)
    if not found:
        return ""
    qualified = any(cost.seconds.get("qualifier") for cost in found.values())
    parts = ["draft", "target", *(["qualifier"] if qualified else []), "overlap", "rest"]
    rows = [
        [
            role,
            *(
                f"{seconds * 1e3:.2f}"
                for seconds in (cost.total, *(cost.seconds.get(part, 0.0) for part in parts))
            ),
            number(cost.drafted, ".1f"),
            number(cost.written, ".2f"),
        ]
        for role, cost in found.items()
    ]
    columns = COLUMNS if qualified else [column for column in COLUMNS if column != "qualifier"]
    return markdown(columns, rows)


def pass_words(file: CellFile) -> str:
    """Milliseconds of a pass of each model in rounds with a qualifier, in a sentence; empty where
    there are none, or nobody counted.

    A pass of the qualifier or the target reads several tokens there, one of the draft mostly one.
    """
    measured = file.measured()
    entry = next(
        (
            entry
            for role in measured.labels
            if (entry := measured.entry(role)).qualifier_calls and entry.draft_calls
        ),
        None,
    )
    if (
        entry is None
        or not entry.time_share
        or min(entry.draft_calls, entry.qualifier_calls) <= len(entry.per_prompt)
    ):
        return ""
    wall, texts = sum(row.seconds for row in entry.per_prompt), len(entry.per_prompt)
    # without each model's pass over the prompt
    calls = {
        "draft": entry.draft_calls - texts,
        "qualifier": entry.qualifier_calls - texts,
        "target": sum(row.target_calls for row in entry.per_prompt),
    }
    each = {
        role: (entry.time_share.get(role) or 0.0) * wall / count * 1e3
        for role, count in calls.items()
    }
    values = ", ".join(f"{role} {each[role]:.1f}" for role in calls)
    return f"Milliseconds of a pass in rounds of {entry.strategy}, whatever it reads: {values}."
