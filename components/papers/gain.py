"""SPIDE's speed over SD by the formulas, with its paper's own acceptance, costs and settings."""

from __future__ import annotations

from draftwell.components import formulas
from draftwell.components.papers.tables import Paper

LONG = 256
"""Tokens of a long text, over which beginnings and ends hardly count; the paper's have up to 256 on
GSM8K and 1024 on HumanEval."""


def gains(paper: Paper) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Pair and data set → its α, s, γ and τ, SPIDE over SD by the formulas, the paper's SD
    over its formula, the first with such an SD, and the paper's value."""
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
