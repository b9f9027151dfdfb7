"""The rule by which our values are compared with the papers'."""

from __future__ import annotations

import pytest

from components.papers.estimates import Estimate
from components.papers.verdicts import Verdict, verdict


@pytest.mark.parametrize(("paper", "ours", "neutral", "wanted"), [
    (1.40, (1.22, 1.21, 1.23), 1.0, Verdict.REPRODUCED),  # within 15 %, though not inside
    (1.40, (1.18, 1.00, 1.45), 1.0, Verdict.REPRODUCED),  # inside a narrow interval, though 16 % away
    (1.40, (1.18, 0.80, 1.60), 1.0, Verdict.NOT_REPRODUCED),  # inside an interval that says nothing
    (1.40, (1.10, 1.05, 1.15), 1.0, Verdict.DIRECTION),
    (1.40, (1.10, 0.99, 1.15), 1.0, Verdict.NOT_REPRODUCED),  # the interval has the other side, too
    (0.60, (0.90, 0.85, 0.95), 1.0, Verdict.DIRECTION),
    (1.40, (0.90, 0.85, 0.95), 1.0, Verdict.NOT_REPRODUCED),
    (8.00, (4.00, 3.90, 4.10), None, Verdict.NOT_REPRODUCED),  # no direction where there is no "no effect"
    (1.40, None, 1.0, Verdict.OPEN)])
def test_rule(paper: float, ours: tuple[float, float, float] | None, neutral: float | None, wanted: Verdict) -> None:
    assert verdict(paper, None if ours is None else Estimate(*ours), neutral) == wanted
