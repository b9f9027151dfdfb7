"""A release is judged on prompts that neither it nor the champion was made from; where these are
too few or not known, the gate says so."""

from __future__ import annotations

import pytest

from draftwell.components.gate.own_prompts import JudgingPrompts
from draftwell.components.prompts.overlap import TrainingPrompts, hashes_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.bundle.verdict import FAILED, UNDECIDED, Check, GateVerdict, Thresholds

ROWS = [Prompt(f"p{i}", None, [f"question {i}"]) for i in range(24)]
NOBODY = TrainingPrompts()
WARN, REFUSE = Thresholds(), Thresholds(unknown_prompts="refuse")
SLOWER = GateVerdict(
    (Check("regression", 0.8, 0.95, False, "slower"), Check("speedup", 0.9, 1.0, False, "slow"))
)


def used(count: int) -> TrainingPrompts:
    return TrainingPrompts.of(
        {
            "acceptance_table": hashes_of(ROWS[: count // 2]),
            "decoding_config": hashes_of(ROWS[:count]),
        }
    )


def test_own_prompts_are_left_out_and_counted() -> None:
    rows = JudgingPrompts.choose(ROWS, used(6), NOBODY, 16)
    assert rows.prompts == ROWS[6:22]
    assert rows.verdict(WARN) == GateVerdict(
        (), ("6 prompts left out: they were used to make acceptance_table, decoding_config",)
    )
    assert JudgingPrompts.choose(ROWS, used(0), NOBODY, None).prompts == ROWS


@pytest.mark.parametrize(
    ("own", "limit", "passes"),
    [(16, 16, True), (17, 16, False), (24, 16, False), (22, 2, True), (23, 2, False)],
)
def test_too_few_others_fail_by_name(own: int, limit: int, passes: bool) -> None:
    """Eight, or as many as were asked for, must be new to the release."""
    rows = JudgingPrompts.choose(ROWS, used(own), NOBODY, limit)
    assert rows.prompts
    verdict = rows.verdict(WARN)
    assert bool(verdict.checks) is not passes
    for check in verdict.checks:
        assert (check.name, check.value, check.passed, check.transient) == (
            "untouched prompts",
            24 - own,
            False,
            False,
        )
        assert check.detail.startswith(
            f"judged on its own training prompts: {own} of 24 were used to make "
            "acceptance_table, decoding_conf"
        )


def test_prompts_that_only_the_champion_learnt_from_are_left_out() -> None:
    """It would decode what it was tuned on."""
    champion = TrainingPrompts.of({"decoding_config": hashes_of(ROWS[4:12])})
    rows = JudgingPrompts.choose(ROWS, used(6), champion, 16)
    assert rows.prompts == ROWS[12:]
    assert (
        rows.verdict(WARN).notes[1]
        == "6 prompts left out: they were used to make the champion's decoding_config"
    )
    assert rows.excuse(SLOWER) == SLOWER, "a fair comparison counts"


def test_where_only_the_champions_prompts_are_left_a_regression_on_them_is_no_evidence() -> None:
    """Recurring traffic would else have nothing to judge on; what passes in spite of them
    passes."""
    champion = TrainingPrompts.of({"decoding_config": hashes_of(ROWS[:20])})
    rows = JudgingPrompts.choose(ROWS, NOBODY, champion, 6)
    assert rows.prompts == [*ROWS[20:], *ROWS[:2]], "the others first"
    assert "favour it" in rows.verdict(WARN).notes[-1]
    assert rows.verdict(WARN).checks == ()
    results = {check.name: check.result for check in rows.excuse(SLOWER).checks}
    assert results == {"regression": UNDECIDED, "speedup": FAILED}
    fast = GateVerdict((Check("sampled regression", 1.0, 0.95, True, "fast"),))
    assert rows.excuse(fast) == fast
    sampled = GateVerdict((Check("sampled regression", 0.8, 0.95, False, "slower"),))
    assert rows.excuse(sampled).result == UNDECIDED


def test_unknown_training_prompts_are_a_warning_or_a_refusal() -> None:
    """Of the release, of the champion, and where only part of them is known."""
    mine = TrainingPrompts.of(
        {"verifier": None, "decoding_config": hashes_of(ROWS[:2])}, {"decoding_config": ["traces"]}
    )
    rows = JudgingPrompts.choose(
        ROWS, mine, TrainingPrompts.of({"verifier": None, "acceptance_table": None}), 16
    )
    assert rows.prompts == ROWS[2:18]
    names = "verifier, decoding_config (made from: traces), the champion's acceptance_table"
    warned, refused = rows.verdict(WARN), rows.verdict(REFUSE)
    assert warned.checks == ()
    assert warned.notes[-1].startswith(f"warning: training prompts unknown: {names} (")
    [check] = refused.checks
    assert (check.name, check.value, check.result, check.detail) == (
        "training prompts known",
        3,
        FAILED,
        f"not recorded: {names}",
    )
    assert JudgingPrompts.choose(ROWS, used(2), used(4), 16).verdict(REFUSE).passed
    too_few = JudgingPrompts.choose(
        ROWS[:4], TrainingPrompts.of({"verifier": None, "head": hashes_of(ROWS)}), NOBODY, 16
    )
    assert [check.name for check in too_few.verdict(REFUSE).checks] == [
        "untouched prompts",
        "training prompts known",
    ]
