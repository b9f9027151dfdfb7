"""SPIDE's speed over SD, from ours to the paper's: what changes when one condition after the other becomes the paper's."""

from __future__ import annotations

from components.papers import formulas
from components.papers.cell_file import CellFile
from components.papers.predictions import decoding_speed, spide_rows, texts
from components.papers.tables import PublishedPair

COLUMNS = ("SPIDE over SD", "times as fast")
WORDS = ("From our gain to the paper's, for the fastest SPIDE and SD here (rows but the first and the last two are by the formulas, with "
         "tokens of one chance each):")
LONG = 256
"""Tokens of the paper's texts, at most, on GSM8K; they have up to 1024 on HumanEval."""


def gain_steps(file: CellFile, pair: PublishedPair) -> list[tuple[str, float]]:
    """(condition, SPIDE's speed over SD's), each step with the conditions of those above it; empty without the passes or the strategies.

    Args:
        pair: the paper's.
    """
    costs, found = file.costs, file.measured()
    if costs is None or costs.alone is None or costs.busy is None or not {"SD", "SPIDE"} <= found.labels.keys():
        return []
    label, base = found.label("SPIDE"), found.entry("SD")
    ours = next((row for row in spide_rows(file, costs) if row.engine == label), None)
    entry = found.entries[label]
    measured = decoding_speed(entry, base)
    if ours is None or measured is None:
        return []
    tau, gamma = float(entry.parameters["tau"]), int(base.parameters["num_speculative_tokens"])

    def by_formula(alone: formulas.Passes, rest: float) -> float:
        slow = sum(formulas.sd_seconds(tokens, alpha, gamma, alone, rest) for tokens, alpha in texts(base))
        return slow / sum(formulas.spide_seconds(tokens, alpha, tau, alone, alone, rest) for tokens, alpha in texts(entry))

    flat = costs.alone[0], {1: costs.alone[1][1]}
    theirs = by_papers_conditions(pair)
    return [("measured here", measured),
            ("acceptance, lengths and passes as here, while both models compute too", ours.predicted),
            ("and neither model slows the other", by_formula(costs.alone, costs.t_rest)),
            ("and a target pass takes as long over several tokens as over one, nothing outside passes", by_formula(flat, 0.0)),
            (f"and acceptance {pair.alpha:.2f}, s {pair.ratio}, γ {pair.gamma}, τ {pair.tau:g}, {LONG} tokens, as in the paper", theirs),
            (f"over an SD that reaches {pair.sd_share:.0%} of its formula, as the paper's does at most", theirs / pair.sd_share),
            ("the paper", pair.gain)]


def by_papers_conditions(pair: PublishedPair) -> float:
    """SPIDE over SD by the formulas with the paper's acceptance and costs: a target pass takes `ratio` draft passes and a quarter.

    >>> round(by_papers_conditions(PublishedPair(0.95, 11, 0.7, 7, 0.78, 1.62)), 2)
    1.29
    """
    passes = 1.0, {1: pair.ratio + 0.25}
    slow = formulas.sd_seconds(LONG, pair.alpha, pair.gamma, passes)
    return slow / formulas.spide_seconds(LONG, pair.alpha, pair.tau, passes, passes)


def run_lengths(alpha: float, gamma: int) -> float:
    """MAT of a strategy whose drafts nothing cuts short over SD's, with tokens of one chance each: 1 / (1 − α^γ).

    >>> round(run_lengths(0.95, 11), 2), round(run_lengths(0.5, 1), 2)
    (2.32, 2.0)
    """
    return 1 / (1 - alpha ** gamma)
