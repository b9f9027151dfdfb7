"""SPIDE's speed over SD, from ours to the paper's: what changes when one condition after the other
becomes the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from draftwell.components.papers import formulas
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.predictions import decoding_speed, spide_rows, texts
from draftwell.components.papers.tables import Paper
from draftwell.components.report.tables import markdown

WORDS = (
    "## From our gain to the paper's\n\n"
    "SPIDE over SD, the fastest of each here. All rows but the first and the last are by the "
    "formulas, in which every token of a text is accepted with the same probability. The last but "
    "one divides by "
    "the share of its formula that the paper's SD reaches: it shows where the difference lies and "
    "confirms nothing.\n\n"
)
STEPS = (
    "measured here",
    "predicted with our acceptance, text lengths and pass times, contention included",
    "and neither model slows the other",
    "and a target pass takes as long over several tokens as over one",
    "and there is no overhead outside passes",
    "and acceptance is the paper's",
    "and costs and settings are the paper's, texts of 256 tokens",
    "and SD reaches the share of its formula that the paper's does at most",
    "the paper",
)
LONG = 256
"""Tokens of a long text, over which beginnings and ends hardly count; the paper's have up to 256 on
GSM8K and 1024 on HumanEval."""


class PublishedPair(NamedTuple):
    """A pair of SPIDE's paper on one data set.

    Args:
        alpha: chance that SD accepts a token.
        gamma: SD's draft length.
        tau: SPIDE's threshold.
        ratio: s, draft passes in a target pass, rounded down.
        sd_share: its SD's speed over Leviathan's formula with c = 1 / s, which is c's upper end.
        gain: SPIDE's speed over SD's.
    """

    alpha: float
    gamma: int
    tau: float
    ratio: int
    sd_share: float
    gain: float


def published_pair(paper: Paper, theirs: str, data: str) -> PublishedPair:
    """One of the paper's pairs, by its tables."""
    speed, spide, mat, gamma, ratio, tau = (
        paper.value(path) or 0.0
        for path in (
            *(f"{data}.{name}.{theirs}.speed" for name in ("SD", "SPIDE")),
            *(f"{data}.SD.{theirs}.mat", f"gamma.{theirs}", f"s.{theirs}", f"tau.{data}.{theirs}"),
        )
    )
    alpha = formulas.token_acceptance(mat, int(gamma))
    predicted = formulas.leviathan_speedup(alpha, int(gamma), 1 / ratio)
    return PublishedPair(alpha, int(gamma), tau, int(ratio), speed / predicted, spide / speed)


def gain_table(paper: Paper, cells: Mapping[str, CellFile]) -> str:
    """A column for each measured cell of the paper's first table; empty where none has passes."""
    found = {}
    for one in paper.tables[0].each:
        file = cells.get(one["cell"])
        steps = gain_steps(file, published_pair(paper, one["theirs"], one["data"])) if file else []
        if steps:
            found[one["label"]] = steps
    rows = [
        [what, *(f"{steps[i]:.2f}" for steps in found.values())] for i, what in enumerate(STEPS)
    ]
    return WORDS + markdown(("SPIDE over SD", *found), rows) if found else ""


def gain_steps(file: CellFile, pair: PublishedPair) -> list[float]:
    """SPIDE's speed over SD's at each of `STEPS`, each with the conditions of those above it; empty
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
        measured,
        ours.predicted,
        by_formula(costs.alone, costs.t_rest),
        by_formula(flat, costs.t_rest),
        by_formula(flat, 0.0),
        by_formula(flat, 0.0, pair.alpha),
        theirs,
        theirs / pair.sd_share,
        pair.gain,
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
