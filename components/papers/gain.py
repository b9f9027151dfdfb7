"""SPIDE's speed over SD, from ours to the paper's: what changes when one condition after the other
becomes the paper's."""

from __future__ import annotations

from draftwell.components.papers import formulas
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.predictions import decoding_speed, spide_rows, texts
from draftwell.components.papers.tables import PublishedPair

COLUMNS = ("SPIDE over SD", "times as fast")
WORDS = (
    "From our gain to the paper's, for the fastest SPIDE and SD here. All rows but the "
    "first and the last are by the formulas, in "
    "which every token is accepted independently with the same probability; the last but "
    "one divides by the share of its formula "
    "that the paper's SD reaches, so it shows where the difference lies and confirms nothing:"
)
LONG = 256
"""Tokens of a long text, over which beginnings and ends hardly count; the paper's have up to 256 on
GSM8K and 1024 on HumanEval."""


def gain_steps(file: CellFile, pair: PublishedPair) -> list[tuple[str, float]]:
    """(condition, SPIDE's speed over SD's), each step with the conditions of those above it; empty
    without the passes or the strategies.

    Args:
        pair: the paper's.
    """
    costs, found = file.costs, file.measured()
    if costs is None or costs.alone is None or costs.busy is None:
        return []
    if not {"SD", "SPIDE"} <= found.labels.keys():
        return []
    label, base = found.label("SPIDE"), found.entry("SD")
    ours = next((row for row in spide_rows(file, costs) if row.engine == label), None)
    entry = found.entries[label]
    measured = decoding_speed(entry, base)
    if ours is None or measured is None:
        return []
    tau, gamma = float(entry.parameters["tau"]), int(base.parameters["num_speculative_tokens"])

    def by_formula(alone: formulas.Passes, rest: float, accepted: float | None = None) -> float:
        slow = sum(
            formulas.sd_seconds(tokens, accepted or alpha, gamma, alone, rest)
            for tokens, alpha in texts(base)
        )
        return slow / sum(
            formulas.spide_seconds(tokens, accepted or alpha, tau, alone, alone, rest)
            for tokens, alpha in texts(entry)
        )

    flat = costs.alone[0], {1: costs.alone[1][1]}
    theirs = by_papers_conditions(pair)
    return [
        ("measured here", measured),
        (
            "predicted with our acceptance, text lengths and pass times, contention included",
            ours.predicted,
        ),
        ("and neither model slows the other", by_formula(costs.alone, costs.t_rest)),
        (
            "and a target pass takes as long over several tokens as over one",
            by_formula(flat, costs.t_rest),
        ),
        ("and there is no overhead outside passes", by_formula(flat, 0.0)),
        (f"and acceptance is the paper's {pair.alpha:.2f}", by_formula(flat, 0.0, pair.alpha)),
        (
            (
                f"and costs and settings are the paper's (s {pair.ratio}, γ {pair.gamma}, τ "
                f"{pair.tau:g}), texts of {LONG} tokens"
            ),
            theirs,
        ),
        (
            f"and SD reaches {pair.sd_share:.0%} of its formula, as the paper's does at most",
            theirs / pair.sd_share,
        ),
        ("the paper", pair.gain),
    ]


def by_papers_conditions(pair: PublishedPair) -> float:
    """SPIDE over SD by the formulas with the paper's acceptance, costs and settings: a target pass
    takes s draft passes.

    >>> round(by_papers_conditions(PublishedPair(0.95, 11, 0.7, 7, 0.78, 1.62)), 2)
    1.31
    """
    passes = 1.0, {1: float(pair.ratio)}
    slow = formulas.sd_seconds(LONG, pair.alpha, pair.gamma, passes)
    return slow / formulas.spide_seconds(LONG, pair.alpha, pair.tau, passes, passes)


def spides_formula(pair: PublishedPair) -> float:
    """SPIDE over plain decoding in the same way.

    >>> round(spides_formula(PublishedPair(0.95, 11, 0.7, 7, 0.78, 1.62)), 2)
    4.66
    """
    passes = 1.0, {1: float(pair.ratio)}
    return LONG * pair.ratio / formulas.spide_seconds(LONG, pair.alpha, pair.tau, passes, passes)
