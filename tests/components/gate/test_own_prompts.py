"""A release is not judged on its own training prompts: these are left out, and where too few others are there the gate fails by name."""

from __future__ import annotations

import pytest

from components.gate.own_prompts import untouched_prompts
from components.prompts.overlap import TrainingPrompts, hashes_of
from components.prompts.prompt import Prompt

ROWS = [Prompt(f"p{i}", None, [f"question {i}"]) for i in range(24)]


def used(count: int) -> TrainingPrompts:
    return TrainingPrompts.of({"acceptance_table": hashes_of(ROWS[: count // 2]), "decoding_config": hashes_of(ROWS[:count])})


def test_own_prompts_are_left_out_and_counted() -> None:
    left, verdict = untouched_prompts(ROWS, used(6), 16)
    assert left == ROWS[6:22]
    assert verdict.checks == ()
    assert verdict.notes == ("6 prompts left out: they were used to make acceptance_table, decoding_config",)
    assert untouched_prompts(ROWS, used(0), None)[0] == ROWS


@pytest.mark.parametrize(("own", "limit", "passes"), [(16, 16, True), (17, 16, False), (24, 16, False), (22, 2, True), (23, 2, False)])
def test_too_few_others_fail_by_name(own: int, limit: int, passes: bool) -> None:
    """Eight, or as many as were asked for, must be new to the release."""
    rows, verdict = untouched_prompts(ROWS, used(own), limit)
    assert rows
    assert bool(verdict.checks) is not passes
    for check in verdict.checks:
        assert (check.name, check.value, check.passed, check.transient) == ("untouched prompts", 24 - own, False, False)
        assert check.detail.startswith(f"judged on its own training prompts: {own} of 24 were used to make acceptance_table, decoding_conf")


def test_what_an_older_version_made_is_noted() -> None:
    rows, verdict = untouched_prompts(ROWS, TrainingPrompts.of({"verifier": None}), 16)
    assert (rows, verdict.checks) == (ROWS[:16], ())
    assert verdict.notes == ("training prompts unknown: verifier (made by an older version)",)
