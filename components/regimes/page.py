"""Which method pays where, as the table of the page "What pays when"."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import numpy as np

from draftwell.components.regimes.lines import break_even_alphas, break_even_costs
from draftwell.components.regimes.speedups import (
    KEPT_BY_ASD,
    METHODS,
    RESCUED,
    Pair,
    Placement,
    csd,
)
from draftwell.components.report.tables import span

COLUMNS = ("the draft computes", "pair", "by formula")
TURN, OWN = Placement.IN_TURN, Placement.OWN
ALPHAS = (0.5, 0.7, 0.8, 0.9)
COSTS = tuple(np.geomspace(0.02, 0.5, 60).tolist())
CHEAP, DEAR = 0.05, 0.2
"""Costs that rows are of."""


def table() -> str:
    """At most eight rows, as Markdown."""
    lines = [" | ".join(row) for row in (COLUMNS, ("---",) * len(COLUMNS), *rows())]
    return "\n".join(f"| {line} |" for line in lines)


def rows() -> list[tuple[str, str, str]]:
    """Where the draft computes, for which pairs, and what pays there."""
    even = [break_even_costs("DuoDecoding", "SD", alpha, OWN, COSTS)[0] for alpha in ALPHAS]
    flagged = [break_even_alphas("SPRINTER", "SD", c, TURN)[-1] for c in (CHEAP, DEAR)]
    rescues = [
        csd(Pair(CHEAP, alpha), share=share) / METHODS["SD"](Pair(CHEAP, alpha), TURN)
        for share, alpha in product((KEPT_BY_ASD, *RESCUED), ALPHAS)
    ]
    least, most = (f"{share * 100:.0f} %" for share in RESCUED)
    shares = f"{KEPT_BY_ASD * 100:.0f} % (ASD, counted), {least} and {most} (CSD)"
    wasted = gains(("SPIDE", "PEARL"), "SD", (CHEAP, DEAR), TURN)
    return [
        ("in turn", "α below c", "plain decoding"),
        *(
            (
                "in turn",
                f"c {c}, α {listed(ALPHAS)}",
                "SD " + listed([gain("SD", "plain decoding", c, a, TURN) for a in ALPHAS]) + " ×",
            )
            for c in (CHEAP, DEAR)
        ),
        (
            "in turn",
            f"c {CHEAP}, {DEAR}, same α",
            f"SPIDE, PEARL, DuoDecoding {wasted} × SD: drafts are lost",
        ),
        (
            "on its own device",
            "c 0.1 to 0.25, α 0.8 to 0.95",
            f"SPIDE {gains(('SPIDE',), 'SD', (0.1, 0.145, 0.25), OWN, (0.8, 0.9, 0.95))} × SD",
        ),
        (
            "on its own device",
            f"α {listed(ALPHAS)}",
            f"DuoDecoding, PEARL beat SD from c {listed(even, '.2f')}",
        ),
        (
            "in turn, lossy",
            f"ASD, CSD, c {CHEAP}",
            f"{span(rescues)} × SD if {shares} of rejections stay",
        ),
        (
            "in turn, lossy",
            f"SPRINTER, c {CHEAP}, {DEAR}",
            f"beats SD up to α {listed(flagged, '.2f')} with a verifier of AUC 0.9",
        ),
    ]


def gain(name: str, base: str, c: float, alpha: float, placement: Placement) -> float:
    """How many times as fast as another method one is."""
    pair = Pair(c, alpha)
    return METHODS[name](pair, placement) / METHODS[base](pair, placement)


def gains(
    names: Iterable[str],
    base: str,
    costs: Iterable[float],
    placement: Placement,
    alphas: Iterable[float] = ALPHAS,
) -> str:
    """The smallest and the largest gain of some methods, costs and acceptances."""
    places = product(names, (base,), costs, alphas)
    return span([gain(*place, placement) for place in places])


def listed(values: Iterable[float], form: str = ".1f") -> str:
    """Numbers with commas.

    >>> listed((0.5, 0.75), ".2f")
    '0.50, 0.75'
    """
    return ", ".join(f"{value:{form}}" for value in values)
