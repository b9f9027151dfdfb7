"""The rule by which our values are compared with the papers'."""

from __future__ import annotations

import pytest

from draftwell.components.papers.estimates import Estimate
from draftwell.components.papers.verdicts import Verdict, verdict


@pytest.mark.parametrize(
    ("paper", "ours", "neutral", "wanted"),
    [
        (1.40, (1.22, 1.21, 1.23), 1.0, Verdict.REPRODUCED),  # within 15 %, though not inside
        # 16 % away: an interval that is wide enough to hold the paper's does not help
        (1.40, (1.18, 1.01, 1.45), 1.0, Verdict.DIRECTION),
        (1.40, (1.10, 1.05, 1.15), 1.0, Verdict.DIRECTION),
        (
            1.22,
            (1.07, 1.05, 1.09),
            1.0,
            Verdict.DIRECTION,
        ),  # within 15 %, with a third of the effect
        (1.22, (1.11, 1.09, 1.13), 1.0, Verdict.REPRODUCED),
        # within 15 %, with more than twice the effect
        (1.08, (1.18, 1.16, 1.20), 1.0, Verdict.DIRECTION),
        (0.85, (0.95, 0.94, 0.96), 1.0, Verdict.DIRECTION),
        (0.60, (0.90, 0.85, 0.95), 1.0, Verdict.DIRECTION),
        (1.40, (0.90, 0.85, 0.95), 1.0, Verdict.NOT_REPRODUCED),
        # An effect that is absent, or the opposite of the paper's, is not reproduced however near
        # its value is:
        (1.40, (1.10, 0.99, 1.15), 1.0, Verdict.NOT_REPRODUCED),
        (1.12, (1.01, 0.98, 1.04), 1.0, Verdict.NOT_REPRODUCED),
        (0.90, (1.01, 0.97, 1.05), 1.0, Verdict.NOT_REPRODUCED),
        # An interval that holds both no effect and the paper's value speaks for neither:
        (1.12, (0.98, 0.93, 1.14), 1.0, Verdict.UNDECIDED),
        (0.90, (1.00, 0.90, 1.10), 1.0, Verdict.UNDECIDED),
        (0.91, (0.95, 0.85, 1.06), 1.0, Verdict.UNDECIDED),
        # An interval wider than half of the value decides nothing where it holds no effect or the
        # paper's value:
        (1.40, (1.40, 1.00, 1.80), 1.0, Verdict.TOO_FEW),
        (1.40, (1.40, 1.05, 1.80), 1.0, Verdict.TOO_FEW),
        (1.40, (0.90, 0.60, 1.10), 1.0, Verdict.TOO_FEW),
        # surely on the other side, however wide
        (1.40, (0.50, 0.30, 0.70), 1.0, Verdict.NOT_REPRODUCED),
        (2.60, (8.64, 5.07, 22.8), 1.0, Verdict.DIRECTION),
        (8.00, (8.00, 4.00, 12.0), None, Verdict.TOO_FEW),
        # Where the paper claims no effect, ours must be as near, and surely so:
        (1.02, (1.00, 0.98, 1.03), 1.0, Verdict.REPRODUCED),
        (1.02, (0.98, 0.97, 0.99), 1.0, Verdict.REPRODUCED),
        (1.02, (0.90, 0.85, 1.05), 1.0, Verdict.UNDECIDED),
        (1.00, (1.30, 0.95, 1.55), 1.0, Verdict.UNDECIDED),
        (1.00, (1.01, 0.80, 1.25), 1.0, Verdict.UNDECIDED),
        (1.02, (1.10, 1.08, 1.12), 1.0, Verdict.NOT_REPRODUCED),
        (0.96, (0.88, 0.86, 0.90), 1.0, Verdict.NOT_REPRODUCED),
        # no direction where there is no "no effect"
        (8.00, (4.00, 3.90, 4.10), None, Verdict.NOT_REPRODUCED),
        (0.60, (0.65, 0.60, 0.70), None, Verdict.REPRODUCED),
        (0.60, (0.48, 0.40, 0.61), None, Verdict.UNDECIDED),
        # Differences of shares, whose no effect is 0, are compared in points: a share of nothing is
        # nothing.
        (0.000, (0.005, -0.01, 0.02), 0.0, Verdict.REPRODUCED),
        (0.000, (0.000, -0.04, 0.04), 0.0, Verdict.UNDECIDED),
        (0.000, (-0.07, -0.09, -0.05), 0.0, Verdict.NOT_REPRODUCED),
        (0.025, (0.030, 0.01, 0.05), 0.0, Verdict.REPRODUCED),
        (0.100, (0.030, 0.01, 0.05), 0.0, Verdict.DIRECTION),
        (0.025, (0.000, -0.08, 0.08), 0.0, Verdict.TOO_FEW),
        (None, (-0.1, -0.2, 0.1), 0.0, Verdict.NO_VALUE),
    ],
)
def test_rule(
    paper: float | None,
    ours: tuple[float, float, float],
    neutral: float | None,
    wanted: Verdict,
) -> None:
    assert verdict(paper, Estimate(*ours), neutral) == wanted


def test_what_is_measured_otherwise_gets_no_verdict() -> None:
    assert verdict(1.40, Estimate(1.40, 1.39, 1.41), comparable=False) == Verdict.NOT_COMPARABLE


@pytest.mark.parametrize(
    ("paper", "ours", "wanted"),
    [
        (1.40, (1.40, 1.30, 1.50), Verdict.NOT_COMPARABLE),  # the help may be all of it
        (1.40, (1.10, 1.05, 1.15), Verdict.NOT_COMPARABLE),
        (1.40, (1.10, 0.98, 1.20), Verdict.NOT_REPRODUCED),
        (1.40, (0.80, 0.75, 0.85), Verdict.NOT_REPRODUCED),
        (
            1.03,
            (1.25, 1.20, 1.30),
            Verdict.NOT_COMPARABLE,
        ),  # far from the paper's, by the help perhaps
        (0.80, (1.10, 1.05, 1.15), Verdict.NOT_COMPARABLE),
    ],
)
def test_a_value_that_is_too_high_is_judged_where_it_is_not_reproduced_even_so(
    paper: float, ours: tuple[float, float, float], wanted: Verdict
) -> None:
    assert verdict(paper, Estimate(*ours), flattered=True) == wanted
