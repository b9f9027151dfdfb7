"""SPIDE's speed over SD by the formulas, with its paper's own acceptance, costs and settings."""

from __future__ import annotations

from draftwell.components.papers import formulas
from draftwell.components.papers.tables import Paper
from draftwell.components.report.tables import markdown

WORDS = (
    "## The paper's gain by the formulas\n\n"
    "For the paper's pairs: every token of a text of 256 is accepted with the same probability, "
    "a target pass takes s draft passes, and no model slows the other. c is at most 1 / s, so "
    "the paper's SD reaches at most the share of its formula that is named. The last but one "
    "column divides by that share: it shows where the difference lies and confirms nothing.\n\n"
)
HEAD = (
    *("pair, data", "α", "s", "SD's γ", "τ", "SPIDE over SD, by the formulas"),
    *("the paper's SD over its formula", "with such an SD", "the paper"),
)
LONG = 256
"""Tokens of a long text, over which beginnings and ends hardly count; the paper's have up to 256 on
GSM8K and 1024 on HumanEval."""


def gain_table(paper: Paper) -> str:
    """A row for each of the paper's pairs on each of its first two data sets."""
    rows = [
        [
            name,
            *(f"{value:g}" for value in (round(alpha, 2), *settings)),
            *map("{:.2f}".format, found),
        ]
        for name, ((alpha, *settings), found) in gains(paper).items()
    ]
    return WORDS + markdown(HEAD, rows)


def gains(paper: Paper) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Pair and data set → its α, s, γ and τ, and the values of the last four columns."""
    found: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}
    for data, title in (("code", "HumanEval"), ("maths", "GSM8K")):
        for pair in paper.published["s"].values:
            paths = (
                *(f"{data}.SD.{pair}.mat", f"s.{pair}", f"gamma.{pair}", f"tau.{data}.{pair}"),
                *(f"{data}.{method}.{pair}.speed" for method in ("SD", "SPIDE")),
            )
            mat, s, gamma, tau, speed, spide = (paper.value(path) or 0.0 for path in paths)
            alpha = formulas.token_acceptance(mat, int(gamma))
            gain = gain_by_formula(alpha, int(gamma), tau, int(s))
            share = speed / formulas.sd_speedup(alpha, int(gamma), 1.0, 1 / s, {1: 1.0})
            figures = gain, share, gain / share, spide / speed
            found[f"{pair}, {title}"] = (alpha, s, gamma, tau), figures
    return found


def gain_by_formula(alpha: float, gamma: int, tau: float, s: int) -> float:
    """SPIDE over SD where a target pass takes s draft passes, whatever it reads.

    >>> round(gain_by_formula(0.95, 11, 0.7, 7), 2)
    1.31
    """
    passes = 1.0, {1: float(s)}
    slow = formulas.sd_seconds(LONG, alpha, gamma, passes)
    serial = formulas.serial_length(alpha, tau)
    return slow / formulas.overlapped_seconds(LONG, alpha, passes, lambda _: s, serial=serial)
