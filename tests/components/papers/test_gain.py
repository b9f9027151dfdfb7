"""SPIDE's gain over SD with its paper's own figures."""

from __future__ import annotations

import pytest

from draftwell.components import formulas
from draftwell.components.papers.gain import gain_by_formula, gains
from draftwell.components.papers.tables import papers_named


def test_the_papers_target_takes_as_long_over_any_number_of_tokens() -> None:
    """And s draft passes fit into its pass, not one less by rounding."""
    passes = 1.0, {1: 8.0, 32: 8.0}
    serial = formulas.serial_length(0.9, 0.6)
    wanted = formulas.sd_seconds(256, 0.9, 6, passes) / formulas.overlapped_seconds(
        256, 0.9, passes, lambda _: 8, serial=serial
    )
    assert gain_by_formula(0.9, 6, 0.6, 8) == pytest.approx(wanted)
    assert gain_by_formula(0.9, 6, 0.6, 8) > 1.2


def test_a_papers_pair_is_taken_from_its_tables() -> None:
    """DeepSeek on HumanEval: 8.25 accepted tokens at γ 11 are .95 a token, not 8.25 / 9.25; its SD
    is 2.79 times as fast as plain decoding, its formula at c 1/7 says 3.6."""
    (paper,) = papers_named("spide")
    found = gains(paper)
    settings, figures = found["deepseek, HumanEval"]
    assert [round(value, 2) for value in settings] == [0.95, 7, 11, 0.7]
    assert [round(value, 2) for value in figures[1:]] == [0.78, 1.68, 1.62]
    assert len(found) == 12, "six pairs on two data sets"
