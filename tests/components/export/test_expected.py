"""Acceptance beside what a profile lets expect."""

from __future__ import annotations

from draftwell.components.export.expected import Kept, expected_rows, expected_table
from draftwell.components.export.profile import profile_of


def test_a_shorter_draft_is_compared_with_the_beginning_of_the_profile() -> None:
    """Two of the profile's three tokens: 1 + .8 + .4, not the profile's own mean."""
    profile = profile_of(10, (8, 4, 4), method="eagle3", k=3)
    contenders = [Kept("eagle3", 20, (10, 5)), Kept("off", 0, ()), Kept("long", 10, (8, 4, 4, 4))]
    assert expected_rows(profile, contenders) == [
        ["eagle3", "1.75", "2.20", "0.50 0.25", "0.80 0.40"],
        ["long", "2.60", "2.60", "0.80 0.40 0.40", "0.80 0.40 0.40"],
    ]


def test_the_note_says_what_the_profile_was_measured_with() -> None:
    conditions = {"engine": "vllm", "dtype": "bfloat16", "osl": 64}
    profile = profile_of(10, (8,), method="eagle3", k=1, measurement_conditions=conditions)
    assert "engine vllm, dtype bfloat16" in str(expected_table(profile, []).caption)
