"""What a pipeline says of a choice that its gate did not let pass."""

from __future__ import annotations

from typing import Any

import pytest

from draftwell.flows.steps.verdict import refusal
from draftwell.serving.bundle.verdict import Check

FAILED_CHECK = vars(Check("sampled speedup", 0.9, 1.0, False, "0.9 times as fast"))
GREEDY = {"strategy": "spide", "parameters": {"tau": 0.5}}


@pytest.mark.parametrize(
    ("sampled", "said"),
    [
        (
            {"strategy": "svip", "parameters": {"threshold": 0.3}},
            "svip {'threshold': 0.3} was tuned, refused by the gate: 0.9 times as fast",
        ),
        (None, "an earlier choice was tuned, refused by the gate: 0.9 times as fast"),
    ],
)
def test_a_sampled_choice_that_was_kept_from_before_is_refused_too(sampled: Any, said: str) -> None:
    """Flows that do not tune sampled requests leave such a choice where it is, and the gate judges
    it."""
    gated = {"passed": False, "checks": [FAILED_CHECK]}
    assert refusal({**GREEDY, "sampled": sampled}, gated, True) == said
    assert refusal({**GREEDY, "sampled": sampled}, gated, False).startswith(
        "spide {'tau': 0.5} was tuned"
    )
